"""Attention over a sequence that no rank holds: a ring of ranks, an exchange of heads, or the one inside the other."""
