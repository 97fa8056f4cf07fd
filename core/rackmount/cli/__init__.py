"""The `rackmount` program."""
