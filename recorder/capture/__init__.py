"""The training side: which values, when, and the one copy that training pays for. Imports torch, never `write` or `read`."""
