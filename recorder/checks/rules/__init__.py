"""The rules that the recorder brings, by what they look at."""
