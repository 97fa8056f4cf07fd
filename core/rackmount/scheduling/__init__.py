"""Decides which tokens are computed in which step, and which KV blocks hold them."""
