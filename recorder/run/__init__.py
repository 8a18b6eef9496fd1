"""The only entry to recorded data: finds, opens and watches a run. It has what all commands share that read a run."""
