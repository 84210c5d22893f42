"""The state of a run as a checkpoint stores it: by logical name and full shape, whatever the plan."""
