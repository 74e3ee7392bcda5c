"""Runs the command `keytail` for `python -m keytail`."""

import sys

# `python -m` puts the current directory first: files in it must not be imported instead of packages.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

from keytail.main.main import main

if __name__ == "__main__":
    main()
