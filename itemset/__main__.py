"""The `itemset` command, also as `python -m itemset`."""

import sys

from itemset.cli import main

if __name__ == "__main__":
    sys.exit(main())
