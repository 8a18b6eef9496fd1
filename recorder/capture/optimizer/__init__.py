"""Hooks on optimizers, which record parameters, final gradients, state and learning rates of a step."""
