"""What runs on the host: requests, blocks, steps, and the ranks that compute them."""
