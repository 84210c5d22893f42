"""What every data-parallel strategy shares: buckets, the axes of a gradient's sum, the norm, tied weights."""
