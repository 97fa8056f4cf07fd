"""An OpenAI-compatible server for rackmount: routes over an `AsyncEngine`."""
