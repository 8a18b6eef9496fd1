"""Reads recorded runs. Nothing here may import `write`, `capture` or torch."""
