"""Models between colossus and plain torch; one table pairs each layer with its module of torch."""
