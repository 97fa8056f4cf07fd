"""Sampling: what a request may ask for (`params`); how a batch's logits become ids (`sampler`)."""
