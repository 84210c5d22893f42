"""Optimizers that look at whole parameters, exact where ranks hold these in parts."""
