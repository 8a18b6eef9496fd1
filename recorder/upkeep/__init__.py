"""The check whether a run is whole, byte by byte, and the repair of a run whose writers died."""
