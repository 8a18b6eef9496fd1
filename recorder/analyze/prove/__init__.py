"""`recorder prove`: does a program train with the recorder as it does without? It is run, and watched, three times."""
