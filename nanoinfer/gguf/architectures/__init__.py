"""What the architectures in GGUF files are: their settings, their tensors' names, their rotations."""
