"""What an LLM answers by vLLM's names, for programs that were written for vLLM."""
