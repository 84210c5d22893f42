"""``colossus verify``: the user's own model under his plan and in one process, step by step in float64.

Both runs are ordinary launches of a config derived from the user's (`derived`) with one hook (`recorder`), which writes
down what they do (`watch`, `records`). The parent reads both (`stages`, `outputs`, `compare`) and says what it found
(`report`).
"""
