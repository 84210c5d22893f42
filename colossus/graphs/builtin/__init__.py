"""The graphs of colossus, one per file; the registry finds them here."""
