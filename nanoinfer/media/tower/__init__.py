"""The tower, which makes embeddings of pixels: transformers' own, with our weights."""
