"""The rows of all ranks as the tensors of the complete model: which rows hold one value, and how it is put together."""
