"""Which blocks of a model each stage of a pipeline runs."""
