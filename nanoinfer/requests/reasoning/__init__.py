"""Reasoning apart from the answer: the markers that divide an output, and its parts."""
