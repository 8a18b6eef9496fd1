"""The life of a recording, from `import torch` through the discovery of roots to the final summary."""
