"""The training side: selects values and makes the one copy that training pays for. Never imports `write` or `read`."""
