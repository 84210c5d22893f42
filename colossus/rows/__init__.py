"""Rows of tables: a gradient of some of them, and how optimizers update them. Imports torch only."""
