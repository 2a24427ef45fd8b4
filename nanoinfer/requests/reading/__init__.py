"""Texts that are read and not continued: embeddings, classes, and pairs of a query and a document."""
