"""``colossus verify``: the user's own model under their plan and in one process, step by step in float64.

Both runs are launches of the user's config with one hook more, which writes what a step computes, or compares it.
"""
