"""The global view: finds which rows of all ranks are one value, and puts each value together as one tensor."""
