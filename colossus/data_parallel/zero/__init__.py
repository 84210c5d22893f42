"""ZeRO: parameters in rows over data ranks, gathered by blocks, gradients reduced to rows."""
