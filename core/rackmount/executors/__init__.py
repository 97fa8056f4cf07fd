"""Executors: ranks in this process, in processes of this host, or under a launcher."""
