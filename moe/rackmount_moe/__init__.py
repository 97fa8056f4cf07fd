"""Expert kernels, token dispatchers and expert balancers for rackmount."""
