"""Which ranks of a run stand where: which share a batch, which have a module, which attempt counts."""
