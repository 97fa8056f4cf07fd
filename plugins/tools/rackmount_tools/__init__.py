"""Bench, eval, calibrate and simulate commands for rackmount."""
