"""Runs the command `keytail` for `python -m keytail`."""

from keytail.main.main import main

if __name__ == "__main__":
    main()
