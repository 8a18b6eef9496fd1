"""What recordings and traces share: module paths, rules as masks, the current step, hooks without side effects."""
