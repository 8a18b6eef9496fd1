"""The global view: finds which rows of all ranks hold one value, and assembles each value as a tensor of the model."""
