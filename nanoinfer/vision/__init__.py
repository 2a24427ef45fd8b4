"""Images: what they are in a prompt, transformers' processor and tower, and the embeddings that are kept."""
