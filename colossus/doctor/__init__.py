"""``colossus doctor``: the equipment of this machine, and settings that will make trouble."""
