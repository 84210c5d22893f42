"""ZeRO: parameters are stored in rows over data ranks and gathered by blocks, and gradients are reduced to rows."""
