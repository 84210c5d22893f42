"""Strategies that mix with peers by a graph."""
