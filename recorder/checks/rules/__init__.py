"""The rules of the recorder, in one module for each kind of value that they read."""
