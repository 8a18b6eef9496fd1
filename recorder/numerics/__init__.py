"""Arithmetic over the columns of rows: element types, statistics, histograms, units (channels), keys. Reads no file."""
