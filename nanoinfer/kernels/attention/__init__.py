"""Kernels between the q/k/v projection and the output projection, through the paged KV cache."""
