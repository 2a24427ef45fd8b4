"""The command of nanoinfer.integrations.vllm, and the import of its names, as they were first called."""

from nanoinfer.integrations.vllm.names import SITE, install
from nanoinfer.integrations.vllm.run import main

__all__ = ["SITE", "install"]

if __name__ == "__main__":
    main()
