"""``colossus verify``: the user's own model under their plan and in one process, step by step in float64.

Both runs are launches of the user's config with one more hook. In one process it writes the values of each step; under
the plan it compares them.
"""
