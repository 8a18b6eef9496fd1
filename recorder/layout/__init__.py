"""Pure assembly: pieces of a tensor, wherever they lie in it, to the tensor. Knows of no files and no rows."""
