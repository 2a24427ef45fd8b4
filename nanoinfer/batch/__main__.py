"""The command nanoinfer-batch, as python -m nanoinfer.batch."""

import sys

from nanoinfer.batch.cli import main

if __name__ == "__main__":
    sys.exit(main())
