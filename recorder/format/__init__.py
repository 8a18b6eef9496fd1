"""The format of a run on disk: the only thing that the writing and the reading half share. FORMAT.md specifies it."""
