"""Triton kernels, each beside the plain torch reference that says what it computes.

Every file offers one function for the layers: it runs the kernel on CUDA tensors and the reference on CPU tensors.
"""
