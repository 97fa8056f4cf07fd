"""One device's side of the engine: weights, KV cache, the persistent batch and the step."""
