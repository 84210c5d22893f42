"""``colossus verify``: the user's own model under their plan and in one process, step by step in float64.

Both runs are ordinary launches of the user's config with one hook more (`command`). In one process it writes what each
step computes; under the plan every rank compares what it has with that (`hooks`, of what `capture` sees). The parent
puts the ranks' findings in order, and the first that differs is the cause (`report`).
"""
