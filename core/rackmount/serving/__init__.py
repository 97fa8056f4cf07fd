"""Serving many callers at once: an engine core in a process of its own, asked by an event loop."""
