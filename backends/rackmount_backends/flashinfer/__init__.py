"""Attention backend "flashinfer": FlashInfer's paged kernels (arXiv 2501.01005)."""
