"""Steps whose rows name adapters, against PEFT's own models."""
