"""How the files of runs get to a destination: in which order, confirmed one by one, and never over something else."""
