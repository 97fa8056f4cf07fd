"""Everything between text and token ids: prompts in, streamed text and stop strings out."""
