"""Which executor runs the ranks, and the one that needs no other process."""
