"""The graphs of colossus; the registry finds them here."""
