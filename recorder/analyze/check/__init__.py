"""Finds what is wrong with a training, by the rules of `recorder.checks` over all rows of a run."""
