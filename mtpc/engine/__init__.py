"""The engine: requests, pages, batches, and what happened to them."""
