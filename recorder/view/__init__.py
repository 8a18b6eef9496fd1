"""The live page. A small server on this machine follows runs, and draws the blocks of their pages."""
