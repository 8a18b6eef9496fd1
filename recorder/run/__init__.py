"""The only entry to recorded data: finds, opens and watches a run, and has what all questions about a run share."""
