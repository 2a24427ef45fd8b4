"""Products whose sums have one order, whatever the number of tokens, and the check that a GPU keeps it."""
