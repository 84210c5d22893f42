"""Starting the processes of a run, stopping them cleanly, and telling what failed."""
