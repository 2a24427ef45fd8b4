"""Weights as the product kernels' operands: plain ones, and those that change inputs or stand side by side."""
