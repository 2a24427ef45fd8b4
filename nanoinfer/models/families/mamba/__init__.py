"""Families some of whose layers are Mamba2's."""
