"""The check of every byte of a run, and the repair of a run whose writers died."""
