"""The merge tool, which writes the global view of a run as a run of its own."""
