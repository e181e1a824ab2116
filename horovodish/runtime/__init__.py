"""The engine in a process: its start and end, and where its ranks are."""
