"""The format of a run on disk (see FORMAT.md). The writing and the reading side share only this package."""
