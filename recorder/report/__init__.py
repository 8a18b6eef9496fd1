"""The page of a run: collects the data to draw as blocks, and writes the one HTML file that contains the blocks."""
