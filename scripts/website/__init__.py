"""The site: the pages of the repository, reference pages made from the code, and what Sphinx makes of them."""
