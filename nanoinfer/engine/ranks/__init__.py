"""The ranks of an engine: who starts and watches them, and what all of them do together."""
