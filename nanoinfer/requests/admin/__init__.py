"""What an LLM does beside requests: weights, adapters, and sleep mode."""
