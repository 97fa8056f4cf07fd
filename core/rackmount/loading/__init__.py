"""From a model's name to an opened checkpoint."""
