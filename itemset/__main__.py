"""The `itemset` command, also as `python -m itemset`. What it needs takes a second to import: Ctrl-C ends that, too."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command that the process was started with. Returns its exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        from itemset import cli

        return cli.main()  # somebody wants this process not to be interrupted
    # Not an exception: a module that is being imported may take that for its own.
    signal.signal(signal.SIGINT, _end)
    from itemset import cli

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # outside of what `cli.main` answers for
        _end()
        raise


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    os.write(2, b"itemset: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
