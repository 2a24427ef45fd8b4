"""Products with a weight in FP8: of one token, and of several by tensor cores or cuBLAS."""
