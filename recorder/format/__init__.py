"""The format of a run on disk, and the only code that writing and reading share. FORMAT.md specifies it."""
