"""The shipping of runs' files to a destination: in order, confirmed one by one, and never over something else."""
