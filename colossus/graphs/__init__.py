"""Graphs of replicas as data: who sends to whom, with what weight, in each step. No torch."""
