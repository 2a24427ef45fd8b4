"""What a rank does before its first request: it tries steps, compiles kernels, chooses threads, and says so."""
