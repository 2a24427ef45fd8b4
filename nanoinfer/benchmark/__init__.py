"""What bench.py measures, and what it measures against."""
