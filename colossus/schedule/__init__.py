"""Pipeline schedules as lists of actions: building, checking, simulating, drawing and running them; model partition."""
