"""What bench.py needs of models that see: images, what stands for one in a prompt, towers, files beside config.json."""
