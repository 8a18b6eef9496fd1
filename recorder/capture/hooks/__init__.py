"""Hooks on the modules of a model, which hold a number and nothing else, and their work when they fire."""
