"""One rank: it runs on its device the steps that the host's messages describe."""
