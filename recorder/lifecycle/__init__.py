"""The life of a recording, from `import torch` through the search for models to the final summary."""
