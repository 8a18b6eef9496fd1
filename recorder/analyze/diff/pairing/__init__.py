"""Which values of two runs belong together, how far each pair is apart, and what noise alone would make of it."""
