"""What bench.py says: its figures, its files, and what it is at."""
