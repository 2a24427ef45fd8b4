"""Kernels of layers whose tokens choose a few of many experts."""
