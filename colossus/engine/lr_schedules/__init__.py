"""Shapes of the learning rate after warm-up, one per file: progress in [0, 1] -> factor. No torch."""
