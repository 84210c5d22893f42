"""How one matmul is split over ranks: tensor modes as data, the moves of its operands, and what they cost."""
