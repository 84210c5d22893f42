"""Who sends to whom with what weight: graphs of replicas as data, by the step. No torch."""
