"""The state of a run as a checkpoint has it: by logical name and full shape, whatever the plan."""
