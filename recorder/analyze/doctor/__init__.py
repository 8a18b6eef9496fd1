"""Compares the values that should have been recorded with the recorded values: each missing value gets a reason."""
