"""Geometry alone: how the chunks of a tensor, in any layout, make the whole tensor. Knows no files and no rows."""
