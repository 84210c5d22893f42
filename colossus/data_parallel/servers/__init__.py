"""Strategies whose parameters live in server processes."""
