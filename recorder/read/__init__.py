"""Reading recorded runs. Nothing here may import `write`, `capture` or, except for `Run.tensor`, torch."""
