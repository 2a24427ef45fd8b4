"""Kernels that exchange with other ranks."""
