"""The page of a run. Collects the data to draw as blocks, and writes one HTML file that contains the blocks."""
