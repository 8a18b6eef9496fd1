"""Ships the files of runs to a destination: in order, confirmed one by one, and never over another object."""
