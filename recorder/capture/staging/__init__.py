"""Copies each recorded tensor once into a pool of host memory, at training's cost, and computes its statistics."""
