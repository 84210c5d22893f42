"""``colossus doctor``: what this machine has and what will make trouble."""
