"""Products with a GroupWeight: of one token, of several, of many by a dense copy, in one order, on the CPU."""
