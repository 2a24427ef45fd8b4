"""The host: plain Python that decides which sequences run, in which blocks and rows, and keeps the ranks busy."""
