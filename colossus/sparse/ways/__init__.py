"""How the gradient of a table is summed over ranks, and where its rows are: one file each."""
