"""Starting the processes of a run, stopping them cleanly, and reporting what failed."""
