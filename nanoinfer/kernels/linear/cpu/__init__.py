"""Weights of the CPU: cut into parts for the same bits on any number of ranks, and packed."""
