"""The hooks on optimizers: what is recorded at an update, and what an update shows of the program."""
