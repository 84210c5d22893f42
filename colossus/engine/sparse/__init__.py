"""Tables of embeddings whose gradient is of the rows that a step has looked up."""
