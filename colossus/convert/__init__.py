"""Models between colossus and plain torch: `plain`, by the one table of which layer is which module of torch."""
