"""Access to runs in directories and object stores. Files of unknown origin are opened safely."""
