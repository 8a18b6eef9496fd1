"""The one door to what was recorded: finding, opening and watching a run, and what all questions about it share."""
