"""Names that pages of earlier versions gave; the modules are in `keytail.main` now."""
