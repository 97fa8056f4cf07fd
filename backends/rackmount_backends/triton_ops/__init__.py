"""Op set "triton": fused kernels for NVIDIA GPUs. Imports nothing: `op_set` is what is loaded."""
