"""Optimizers that compute with whole parameters, exact although ranks store these in parts."""
