"""The OpenAI-compatible server: routes over an `AsyncEngine`."""
