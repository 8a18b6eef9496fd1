"""Arithmetic over the columns of rows: element types, statistics, histograms, units, and keys. Reads no file."""
