"""Compares a trainer with an inference engine, token by token: where their values first differ, and why."""
