"""Arithmetic on columns of recorded rows: dtypes, statistics, histograms, units (channels), keys. Reads no file."""
