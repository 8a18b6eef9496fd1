"""Questions to a recorded run: everything here takes a `Run` and returns tables or named tuples; it never prints."""
