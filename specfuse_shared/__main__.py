"""`python -m specfuse_shared` is the command `specfuse-llm`."""

import sys

from specfuse_shared.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
