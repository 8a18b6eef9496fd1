"""The live page: a small server on this machine that follows runs, and the blocks that it draws for them."""
