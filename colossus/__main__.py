"""``python -m colossus`` is the ``colossus`` command."""

import sys

from colossus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
