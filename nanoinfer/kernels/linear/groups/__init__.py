"""Products with a GroupWeight: of one token, of several, of many by way of a dense copy, in one order, and on the CPU."""
