"""The page of a run: collects what is drawn as blocks of data, and writes the one HTML file that holds the blocks."""
