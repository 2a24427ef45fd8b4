"""Whole decoders in one launch."""
