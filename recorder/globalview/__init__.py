"""The global view: puts the tensors of all ranks together. It finds the rows of each value and joins them."""
