"""Options of the strategies, one file for each kind. No torch."""
