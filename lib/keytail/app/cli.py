"""The former module name of the command line: `python -m keytail.app.cli` is now `python -m keytail`."""

from keytail.main.main import app, main, run_as_job

__all__ = ["app", "main", "run_as_job"]

if __name__ == "__main__":
    main()
