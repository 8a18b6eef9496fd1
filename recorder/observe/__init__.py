"""The parts that all who look at a model share: modules by path, rules as masks, the current step, safe hooks."""
