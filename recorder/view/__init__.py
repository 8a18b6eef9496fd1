"""The page of a run, live: a small server on this machine that follows runs, and what it draws of them."""
