"""What runs when: schedules as lists of actions, and what executes them."""
