"""The command ``python -m colossus``, which is the ``colossus`` command."""

import sys

from colossus.config_module import put_on_path

put_on_path()  # -m has put the current folder before the standard library

from colossus.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
