"""The memory of one rank: how it is divided, where weights and KV cache lie, and how it is lent."""
