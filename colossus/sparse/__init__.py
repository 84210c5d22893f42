"""Layers over tables with sparse gradients, and a model of words; what a step does with them is `engine/sparse`."""
