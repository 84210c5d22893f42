"""Runs a checked schedule on a rank: the executor, the values between stages, and their transport."""
