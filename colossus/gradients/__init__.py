"""Sums of gradients over ranks: their axes, their buckets, their compression and their norm."""
