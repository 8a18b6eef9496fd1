"""The name and the version of the format, and what its whole numbers may be: for whoever needs no column."""

FORMAT_NAME = "recorder"
FORMAT_VERSION = (1, 3)
"""Major, minor. Readers refuse another major and accept any minor."""
MAX_COUNT = 1 << 53
"""Bound on every whole number of a row: float64 holds them exactly, and sums and products with a width fit int64."""
