"""The command `specfuse-llm`, also as `python -m specfuse_shared`."""

import os
import sys
from contextlib import suppress

from specfuse_shared.cli.setup import INTERRUPTED, PROGRAM


def main() -> int:
    """Run the command. Ctrl-C works from the first import and ends the process at once.

    Otherwise Python would wait for threads that still load, and a second Ctrl-C would print their traceback.
    """
    try:
        from specfuse_shared.cli.commands import main as run

        code = run()
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code != INTERRUPTED:
        return code
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # the reader has left
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
