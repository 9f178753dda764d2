"""The engine: requests, KV pages, the scheduler, and statistics."""
