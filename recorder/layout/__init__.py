"""Pure geometry: makes one tensor of its chunks, wherever they lie in it. Knows of no files and no rows."""
