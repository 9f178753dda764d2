"""Whether a checkpoint's answers are right: one task by several engines, side by side."""
