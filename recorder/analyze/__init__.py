"""Questions about a recorded run. Every function takes a `Run`, returns tables or named tuples, and never prints."""
