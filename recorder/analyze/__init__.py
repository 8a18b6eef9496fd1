"""Questions about a recorded run, as functions that take a `Run`, return tables or named tuples, and never print."""
