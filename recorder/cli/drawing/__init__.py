"""Drawings and shortenings on the terminal: spark lines, where chunks lie, lists of modules, bytes."""
