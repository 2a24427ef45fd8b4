"""Triton kernels, each beside the plain torch reference that says what it computes; grouped by what they serve.

A file offers one function for the layers: it runs the kernel on CUDA tensors and the reference on CPU tensors. For
matrix products that is linear/dispatch.py, which chooses between one_row, few_outputs, tiles, gated and torch's own.
"""
