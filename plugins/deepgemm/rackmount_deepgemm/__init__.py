"""DeepGEMM's FP8 kernels for rackmount."""
