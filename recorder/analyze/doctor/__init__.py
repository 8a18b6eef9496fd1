"""Compares the values that should have been recorded with the recorded ones: every missing value gets a reason."""
