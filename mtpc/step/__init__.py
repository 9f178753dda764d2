"""One MTP iteration: `step.py` is the program, the other modules are what it calls."""
