"""Between ranks: the channel from rank 0, the collectives, memory that peers write to."""
