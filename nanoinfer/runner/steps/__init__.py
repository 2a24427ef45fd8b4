"""What one rank's device computes in a step: the rows, the model over them, and the tokens on their way to the host."""
