"""The page of a run: what is drawn of it as blocks of data, and the one HTML file that holds the blocks."""
