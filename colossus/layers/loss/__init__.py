"""What is computed from logits whose vocabulary may be split: cross-entropy and accuracy."""
