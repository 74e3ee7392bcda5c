#!/bin/sh
# Installs keytail from the wheels beside this script, without a network: sh install.sh DIR [PYTHON]
# DIR: the virtual environment to create, such as /opt/keytail, or an existing one, whose packages are replaced.
# PYTHON: an interpreter of the version that the bundle is for; default python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?"usage: sh install.sh DIR [PYTHON]"}
python=${2:-python3}
wanted=$(cat "$here/python-version")
if ! command -v "$python" > /dev/null; then
    echo "install.sh: there is no $python here: give a Python $wanted after DIR" >&2
    exit 2
fi
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$found" != "$wanted" ]; then
    echo "install.sh: the bundle is for Python $wanted, and $python is Python $found: give a Python $wanted after DIR" >&2
    exit 2
fi
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --force-reinstall \
    --no-index --find-links "$here/wheels" "keytail$(cat "$here/extras")"
# Without the bytecode of the packages' tests, of which NumPy and Numba have many.
"$target/bin/python" -m compileall -qq -x /tests/ "$target/lib" || :  # a module with an invalid syntax is not used
"$target/bin/keytail" --version
echo "Next, as the user that the broker runs as: $target/bin/keytail doctor --warm"
