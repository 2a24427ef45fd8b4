"""Reads a checkpoint's tensors, and slices them to fill the parameters of a rank."""
