#!/usr/bin/env bash
# Installs JRL for TPUs into .venv of this checkout: what setup.sh runs on each host.
#   install.sh [--dry-run]
# If the host has no Python of 3.11 to 3.13 that can make a virtual environment (Ubuntu 22.04 has 3.10),
# uv is installed into ~/.local/bin, and it downloads Python 3.12.

. "$(dirname "$0")/common.sh"
parse "$@"
cd "$(dirname "$0")/.."
find_python() {
  local name
  for name in python3 python3.12 python3.13 python3.11; do
    # Debian and Ubuntu leave ensurepip, which venv needs, to another package.
    "$name" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2> /dev/null && echo "$name" && return
  done
}
python=$(find_python) || python=
if [ -z "$python" ] && [ ! -x .venv/bin/python ]; then
  uv=$HOME/.local/bin/uv
  [ -x "$uv" ] || run env "UV_UNMANAGED_INSTALL=${uv%/*}" bash -o pipefail -c \
    'curl -LsSf https://astral.sh/uv/install.sh | sh'
  run "$uv" venv --seed --python 3.12 .venv
fi
run make install ACCEL=tpu ${python:+"PYTHON=$python"}
