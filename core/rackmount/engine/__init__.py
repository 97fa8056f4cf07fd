"""From prompts to answers: the core that steps, and the engine that people call."""
