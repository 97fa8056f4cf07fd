"""What kernels of several distributions share on the device. Needs Triton, and torch: import its
modules only where kernels are."""
