"""Data-parallel strategies, one per file: how the replicas of the data axis are kept alike."""
