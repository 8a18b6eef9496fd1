"""What is wrong with a training: the rules of `recorder.checks` over all rows of a run."""
