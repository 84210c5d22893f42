"""What data-parallel strategies share: which axes a gradient is summed over, buckets, ties, the norm."""
