"""Runs a script or a module that imports vllm."""

from nanoinfer.integrations.vllm.run import main

main()
