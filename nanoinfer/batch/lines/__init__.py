"""What a line of a batch file asks for, and the line that answers it."""
