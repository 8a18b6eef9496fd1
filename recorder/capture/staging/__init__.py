"""The one copy that training pays for: the pool of host memory, the copies into it, and the measuring of copies."""
