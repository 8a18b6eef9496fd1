"""The one copy that training pays for: the pool of host memory, the ways into it, and what is measured of a copy."""
