"""One matmul split over ranks: tensor modes as data, the moves of its operands, and their cost."""
