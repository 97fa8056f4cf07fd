"""Executors whose ranks are processes: of this host, or of a launcher."""
