"""GGUF checkpoints for rackmount."""
