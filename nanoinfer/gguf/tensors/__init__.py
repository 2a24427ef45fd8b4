"""The tensors of GGUF files, as safetensors' slices."""
