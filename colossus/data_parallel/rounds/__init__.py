"""Strategies that make steps of their own and then take an average."""
