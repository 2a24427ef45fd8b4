"""Images and videos: what they are in a prompt, transformers' processor and tower, and what the decoder gets.

An engine knows images alone: a group of a video's frames for which the same tokens stand is an image to it.
"""
