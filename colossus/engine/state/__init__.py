"""The state of an engine as a checkpoint has it: by logical name and full shape, whatever the plan."""
