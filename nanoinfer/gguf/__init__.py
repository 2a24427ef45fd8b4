"""GGUF files: their metadata as a config and a tokenizer, and their tensors under the names of a checkpoint."""
