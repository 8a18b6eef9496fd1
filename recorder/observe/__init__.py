"""What recordings and traces share: module paths, rules as bit masks, the current step, hooks without side effects."""
