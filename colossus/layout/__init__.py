"""Layouts: how tensors are sharded over mesh axes, and the moves between layouts. `Layout` itself needs no torch."""
