"""What a run reports: metrics, the terminal display, TensorBoard, model FLOP utilisation."""
