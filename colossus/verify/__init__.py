"""``colossus verify``: the user's own model under their plan and in one process, step by step in float64.

Both runs are ordinary launches of a config made from the user's (`configs`) with one hook (`capture`), which turns
dropout off and writes what the run computes (`records`). The parent compares both (`checks`), and says what it found
(`diagnosis`, `report`).
"""
