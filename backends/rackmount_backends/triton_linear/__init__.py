"""Linear kernel "triton": products of few rows. Imports nothing: `TritonLinear` is in `linear`."""
