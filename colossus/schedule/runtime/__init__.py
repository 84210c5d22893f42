"""What runs a checked schedule on a rank: the executor, the values between stages, and what carries them."""
