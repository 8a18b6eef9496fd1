"""Proofs about a program: that recording changes nothing, and that a resumed run is the one that was interrupted."""
