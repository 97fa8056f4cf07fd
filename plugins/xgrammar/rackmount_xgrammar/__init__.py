"""Structured output for rackmount, by xgrammar."""
