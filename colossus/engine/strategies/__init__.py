"""Data-parallel strategies, one per file: how the data axis keeps its replicas together."""
