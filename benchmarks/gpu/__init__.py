"""All that wants a real GPU, in ten minutes: ``scripts/test-gpu``, or ``python -m benchmarks.gpu`` from the root.

A *section* is a module of `benchmarks.gpu.sections` with a function ``cases(device, budget)``. A *case* is one row of
the table. `runner.py` runs each section in a process of its own, and goes on behind a case that crashed or hung.
"""
