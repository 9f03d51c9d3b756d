"""``python -m jitattn``: the same as the ``jitattn`` script."""

import sys

from jitattn.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
