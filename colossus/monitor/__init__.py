"""Reports of a run: metrics, the terminal display, TensorBoard, model FLOP utilisation."""
