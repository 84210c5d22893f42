"""``colossus compare``: the same job under several strategies and plans, one after the other, in one table."""
