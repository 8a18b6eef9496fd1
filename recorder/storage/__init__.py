"""The storage of runs, in directories and object stores, and the opening of files of unknown origin."""
