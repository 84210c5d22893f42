"""The options of the strategies, one file for each kind. No torch."""
