"""One schedule per file, registered by name: a function (stages, microbatches, ...) -> compute actions of each rank.

``stages`` is the number of ranks of the pipeline; a schedule with several chunks per rank has stages x chunks stages.
On one rank there is nothing to overlap: all schedules but GPipe do forward and backward of one microbatch after the
other there, on one stage.
"""
