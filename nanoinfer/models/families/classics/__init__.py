"""Families of before Llama, and those that kept their parts: LayerNorms, MLPs without gates, branches side by side."""
