"""Images, videos and audio: what they are in a prompt, transformers' processors and towers, what the decoder gets.

An engine knows images alone: a group of a video's frames for which the same tokens stand is one to it, and a sound.
"""
