"""Capture: tracing a step to an FX graph, what the graph holds, and running captured steps."""
