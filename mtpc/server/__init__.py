"""`mtpc serve`: an OpenAI-compatible HTTP server over `AsyncEngine`; needs the extra `serve`."""
