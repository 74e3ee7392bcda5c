"""`python -m keytail.app.cli`, which is `python -m keytail` now."""

from keytail.main.main import app, main, run_as_job

__all__ = ["app", "main", "run_as_job"]

if __name__ == "__main__":
    main()
