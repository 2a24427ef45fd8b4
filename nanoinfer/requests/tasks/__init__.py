"""What an engine is asked for, and what it tells: tasks, their samples, and the results of these."""
