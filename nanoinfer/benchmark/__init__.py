"""For bench.py: workloads, and the floor to compare a run with. `determinism` is a command of its own."""
