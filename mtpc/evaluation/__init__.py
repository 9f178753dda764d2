"""Runs a task on several engines, and compares their answers."""
