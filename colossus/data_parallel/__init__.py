"""Data-parallel strategies, which decide what replicas exchange and when: their base, and one file for each kind."""
