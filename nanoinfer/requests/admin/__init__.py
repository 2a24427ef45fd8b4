"""The methods of LLM that run no request: its weights, adapters, memory and figures."""
