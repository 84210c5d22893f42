"""What replicas exchange, and when: the base of the strategies, and one file for each."""
