"""Access to runs in directories and object stores, and the safe opening of files of unknown origin."""
