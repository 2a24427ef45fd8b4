"""Families some of whose layers keep a state: a delta rule's, Mamba2's, or a short convolution's."""
