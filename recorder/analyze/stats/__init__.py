"""Statistics over steps, ranks and modules, combined from those of the rows."""
