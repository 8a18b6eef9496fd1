"""What is wrong with a training: the rules of `recorder.checks` over the rows of a whole run."""
