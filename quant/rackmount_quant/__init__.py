"""Quantization schemes for rackmount."""
