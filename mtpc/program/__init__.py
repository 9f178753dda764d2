"""From options to a program: compile each step, or take it from the graph cache, and bind it."""
