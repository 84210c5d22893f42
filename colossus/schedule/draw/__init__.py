"""A simulated schedule as text and as a picture."""
