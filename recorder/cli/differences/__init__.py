"""How two runs compare, for people: sentences and tables of `recorder diff`."""
