"""Kernels compiled by Numba: they take arrays and numbers, fill arrays, and return numbers."""

import sys
import warnings


def _import_numba() -> None:
    """Import Numba without its configuration file.

    Numba reads `.numba_config.yaml` from the current directory. If the current directory is a log dir, the owner of the
    log dir could make this process write files or run without its kernels. During the import Numba finds no YAML
    parser; afterwards the name of its configuration file is empty, so that a reload reads no file.
    """
    if "numba" in sys.modules:
        return
    parser = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba warns that it has no parser
            import numba.core.config  # noqa: PLC0415 (imported while there is no YAML parser)
    finally:
        del sys.modules["yaml"]
        if parser is not None:
            sys.modules["yaml"] = parser
    numba.core.config._config_fname = ""


_import_numba()
