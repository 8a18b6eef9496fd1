"""Finds what is wrong with a training. The rules of `recorder.checks` judge all rows of the recorded run."""
