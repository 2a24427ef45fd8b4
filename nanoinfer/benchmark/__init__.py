"""For bench.py: workloads, the floor to compare a run with, and the figures of docs/speed.md."""
