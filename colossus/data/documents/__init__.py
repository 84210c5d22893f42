"""Documents: sources of rows, their tokens, and the rows of a model's input that are packed from them."""
