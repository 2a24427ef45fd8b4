"""Layers that lie in host memory, and come to the device while others compute."""
