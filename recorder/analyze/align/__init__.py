"""Where a trainer and an engine part, token by token: tokens of rows, modules in order, weights, and the reply."""
