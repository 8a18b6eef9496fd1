"""The probe, which measures each selected value at every step, and what it measures on the host and on devices."""
