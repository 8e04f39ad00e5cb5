#!/bin/sh
# Make the virtual environment VENV hold this project and its pinned dependencies; at once when it already does.
#
#     scripts/setup.sh VENV
#
# PYTHON chooses the interpreter; otherwise the first of the usual names that is 3.11 or newer is taken.
set -eu
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh VENV}
stamp=$venv/.slipstream-stamp

# The folder is part of the key: an environment that was moved or copied no longer points at this source tree.
key=$({ pwd; cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    exit 0
fi

recent_enough='import sys; sys.exit(sys.version_info < (3, 11))'
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c "$recent_enough" >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" -V 2>&1 | head -n 1) || found="none"
    echo "slipstream needs Python 3.11 or newer (found: $found); install one, or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "$("$python" -V) lacks the venv module; install it (Debian and Ubuntu: apt-get install python3-venv) and try again" >&2
    exit 1
fi

echo "Setting up $venv with $("$python" -V) (once; a minute or two, mostly PyTorch)" >&2
rm -f "$stamp"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
echo "$key" >"$stamp"
