"""One schedule per file, registered by name: a function (stages, microbatches, ...) -> actions of each rank.

``stages`` is the number of ranks of the pipeline; a schedule with chunks splits the model into stages x chunks. On one
rank there is nothing to overlap, and all of them compute one stage, one microbatch after the other (but for GPipe).
"""
