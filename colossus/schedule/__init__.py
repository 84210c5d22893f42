"""Pipeline schedules as lists of actions, which are built, checked, simulated, drawn and run; partitions of models."""
