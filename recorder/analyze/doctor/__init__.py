"""Compares what should have been recorded with what was recorded: every missing value has its reason."""
