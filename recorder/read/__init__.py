"""Reading recorded runs. Must never import `write`, `capture` or, but for `Run.tensor`, torch."""
