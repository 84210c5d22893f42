"""The cost of plans before they run, and the search of the best: step time, traffic, memory."""
