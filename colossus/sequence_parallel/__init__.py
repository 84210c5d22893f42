"""Exact attention over sequences whose tokens are split over ranks.

By a ring of ranks, round which keys and values are passed (`ring`); by an exchange of tokens for heads, inside of which
each rank holds all tokens of its heads (`ulysses`); or by an exchange among neighbours and a ring across (`attend`).
"""
