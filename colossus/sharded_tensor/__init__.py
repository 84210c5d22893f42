"""Tensors of which a rank holds a part: one type, its placement, and the rules of torch's functions on it."""
