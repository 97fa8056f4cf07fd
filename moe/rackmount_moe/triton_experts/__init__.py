"""Expert kernel "triton": fused expert MLPs. Imports nothing: `TritonExperts` is in `experts`."""
