"""Proofs about a program: recording does not change it, and a resumed run continues the interrupted one exactly."""
