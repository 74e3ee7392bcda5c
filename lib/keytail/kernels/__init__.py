"""Arrays and integers in, arrays and return codes out: compiled by Numba."""

import sys
import warnings


def _import_numba() -> None:
    """Import Numba without its configuration file.

    It looks for `.numba_config.yaml` in the current directory. That may be a log dir: its owner could have this process
    write files, or work without its kernels. During the import Numba finds no YAML parser; afterwards the name of
    its configuration file is empty, so that a reload reads none.
    """
    if "numba" in sys.modules:
        return
    parser = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it has no parser
            import numba.core.config  # noqa: PLC0415 (with the above)
    finally:
        del sys.modules["yaml"]
        if parser is not None:
            sys.modules["yaml"] = parser
    numba.core.config._config_fname = ""


_import_numba()
