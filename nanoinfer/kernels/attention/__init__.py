"""From the q/k/v projection through the paged KV cache."""
