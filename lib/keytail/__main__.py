"""The program `keytail`, also run by `python -m keytail`."""

from typing import NoReturn

from keytail.cli.stopping import exit_without_trace


def main() -> NoReturn:
    """Run a command line and exit with its status. Ctrl-C while modules are imported prints no traceback."""
    exit_without_trace()
    from keytail.main.main import main as run  # noqa: PLC0415 (takes up to seconds on a busy machine)

    run()


if __name__ == "__main__":
    main()
