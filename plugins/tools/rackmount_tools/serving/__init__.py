"""Load on a server, and what its clients see of it."""
