"""`python -m itemset` is the `itemset` command."""

import sys

from itemset.cli import main

sys.exit(main())
