"""One schedule per file, registered by name: a function (stages, microbatches) -> actions of each stage's rank."""
