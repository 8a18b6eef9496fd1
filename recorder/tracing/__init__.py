"""`recorder.trace`: the values of a model's calls in memory, for the length of a ``with`` block."""
