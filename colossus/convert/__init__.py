"""Models between colossus and plain torch; one table says which layer corresponds to which module of torch."""
