"""Measurements against torch itself. Run them as modules from the root of the repository (see README.md)."""
