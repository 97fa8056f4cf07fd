"""Linear kernels for quantized weights, in Triton: see `grouped`, `fp8` and `int8`."""
