"""Options of the data-parallel strategies, checked before a process starts. No torch."""
