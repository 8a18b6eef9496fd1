"""The merge tool: the global view of a run, written out as a run of its own."""
