"""Triton kernels, each beside the plain torch reference that says what it computes.

A file offers one function for the layers: it runs the kernel on CUDA tensors and the reference on CPU tensors. For
matrix products that is linear.py, which chooses between one_row_linear, one_wave_linear and torch's own.
"""
