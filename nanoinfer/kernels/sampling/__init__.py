"""Kernels that choose a token by its logit."""
