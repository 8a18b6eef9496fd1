"""Finds what went wrong first in a run: the first value that is not finite, and the first replica that differs."""
