"""The training side: selects values in hooks and copies each to host memory once. Never imports `write` or `read`."""
