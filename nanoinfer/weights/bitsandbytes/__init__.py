"""Matrices as bitsandbytes writes them."""
