"""The training side: which values, when, and the one copy that training pays for. Never imports `write` or `read`."""
