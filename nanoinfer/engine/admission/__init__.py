"""Who is let in when KV-cache blocks are short."""
