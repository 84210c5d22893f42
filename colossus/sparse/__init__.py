"""Tables with sparse gradients: layers that look up in them, their sums over ranks, their optimizers; a word model."""
