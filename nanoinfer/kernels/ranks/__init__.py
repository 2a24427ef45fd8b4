"""Kernels that exchange data with the other ranks."""
