"""Attention backend "triton": paged attention in Triton, for decoding and for prefill."""
