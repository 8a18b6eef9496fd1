"""Verification of every byte of a run, and repair of runs whose writers died."""
