"""An LLM for programs that ask while it runs: from other threads, and from tasks of asyncio."""
