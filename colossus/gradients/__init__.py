"""Sums of gradients over ranks: which axes, in which buckets, compressed or not; their norm."""
