"""Capture: tracing a step to an FX graph, and running captured steps."""
