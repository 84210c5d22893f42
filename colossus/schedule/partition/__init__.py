"""Which blocks of a model each stage of a pipeline runs: by balance of a cost, or as stated."""
