"""The plan of each value: how its chunks make one tensor, or why they make none."""
