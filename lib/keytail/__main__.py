"""Runs the program `keytail`, also as `python -m keytail`."""

import sys

# `python -m` puts the current directory first in the module path: files in it must not be imported instead of packages.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

import atexit
import gc
from typing import NoReturn

from keytail.cli.stopping import exit_without_trace


def main() -> NoReturn:
    """Run a command line and exit with its status. Ctrl-C while modules are imported prints no traceback."""
    exit_without_trace()
    # Modules are never garbage. To search them for it, during imports and at the exit, takes a quarter of the CPU time
    # of a short command.
    gc.disable()
    atexit.register(gc.freeze)
    from keytail.main.main import main as run  # noqa: PLC0415 (takes up to seconds on a busy machine)

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
