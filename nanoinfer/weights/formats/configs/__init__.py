"""The quantization configs of checkpoints, as each tool writes its own."""
