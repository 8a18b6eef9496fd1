"""The global view: finds which rows of all ranks belong to one value, and puts each value together as one tensor."""
