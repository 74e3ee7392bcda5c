"""Names that pages of earlier versions gave; the modules are in `keytail.run` and `keytail.source` now."""
