"""Replicas: several engines behind one LLM, each in a process of its own, which share one queue."""
