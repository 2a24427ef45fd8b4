"""How an LLM starts replicas and reaches them: processes of this machine, or actors in a Ray cluster."""
