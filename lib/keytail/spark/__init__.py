"""Module names of earlier versions; the modules are in `keytail.run` and `keytail.source` now."""
