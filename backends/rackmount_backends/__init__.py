"""Attention backends, op sets and linear kernels for rackmount."""
