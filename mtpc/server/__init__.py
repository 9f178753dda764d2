"""`mtpc serve`: an OpenAI-compatible HTTP server on `AsyncEngine`. It needs the extra `serve`."""
