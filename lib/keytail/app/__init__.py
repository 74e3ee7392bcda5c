"""Module names of earlier versions; the modules are in `keytail.main` now."""
