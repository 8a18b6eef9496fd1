"""The merge tool. It writes the global view of a run (the tensors of all ranks put together) as a run of its own."""
