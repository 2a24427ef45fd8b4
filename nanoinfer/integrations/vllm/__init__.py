"""vLLM's words and names: what its users write, and what that is here."""
