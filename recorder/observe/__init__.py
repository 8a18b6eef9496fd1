"""Helpers of recordings and traces: module paths, rules as masks, the current step, hooks without side effects."""
