"""What the KV cache holds of which prefixes, and who may go on from there."""
