"""Finds where two runs differ: pairs values across layouts, compares differences with noise, traces them to modules."""
