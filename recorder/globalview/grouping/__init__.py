"""Rows of several ranks, grouped by the value that they are rows of."""
