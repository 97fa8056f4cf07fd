"""Model architectures for rackmount."""
