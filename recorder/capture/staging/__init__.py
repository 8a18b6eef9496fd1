"""Copies each recorded tensor once into a pool of host memory, on the training thread, and computes statistics."""
