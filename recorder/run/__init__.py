"""The only entry to recorded data: finds, opens and watches runs. Commands that read a run share this code."""
