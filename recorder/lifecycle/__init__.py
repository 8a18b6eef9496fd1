"""The life of a recording: from `import torch` and the flag, over the roots that are found, to the final summary."""
