"""The rows of all ranks as the tensors of the whole model: which rows are one value, and how it is put together."""
