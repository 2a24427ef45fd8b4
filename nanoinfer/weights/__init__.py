"""How parameters are named, read, sliced and filled."""
