"""How ranks share the work: their process groups, frameworks' marks, and which chunk of a tensor a rank has."""
