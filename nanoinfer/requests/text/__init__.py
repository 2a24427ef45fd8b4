"""Text from tokens and tokens from text: the tokenizer, spelling, a text that grows, and strings that end it."""
