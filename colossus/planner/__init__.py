"""What a plan costs before it runs: the memory of its ranks."""
