#!/usr/bin/env bash
# Makes .venv, with torch first. Does nothing, and needs no network, when .venv already fits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pinned() { sed -n "s/^$1==//p" constraints.txt; }

# Exactly the tested version: a looser request may download gigabytes of another build.
TORCH="$(pinned torch)"
PYTHON=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# The folder counts too: an environment that was moved or copied points at the old place.
key="$({ pwd -P; cat pyproject.toml constraints.txt scripts/setup.sh scripts/install.py; } | cksum | tr ' ' '-')"
stamp=".venv/.ready-$key"
if [ -e "$stamp" ] && [ -x "$PYTHON" ]; then exit 0; fi

fail() {
    echo "make setup: $*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name without_venv=""
    for name in python3.11 python3.12 python3.13 python3; do
        command -v "$name" >/dev/null && is_new_enough "$name" || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$name"
            return
        fi
        without_venv="${without_venv:-$name}"
    done
    if [ -n "$without_venv" ]; then
        local packages=python3-venv
        [ "$without_venv" = python3 ] || packages="$packages $without_venv-venv"
        fail "$without_venv has no venv module; install it (Debian, Ubuntu: apt install $packages)," \
            "then run make setup again"
    fi
    fail "Python 3.11 or newer was not found; install it" \
        "(Debian, Ubuntu: apt install python3 python3-venv), then run make setup again"
}

if ! is_new_enough "$PYTHON" || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "make setup: creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

has_torch() { "$PYTHON" -c '
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    release = version("torch").split("+")[0]
except PackageNotFoundError:
    sys.exit(1)
print(release)
sys.exit(not (2, 11) <= tuple(int(part) for part in release.split(".")[:2]) < (2, 16))'; }

network="the network or the package index may be out of reach; the lines above say more"
if ! torch="$(has_torch)"; then
    echo "make setup: installing torch $TORCH (the largest download; it may take minutes)"
    # A torch with CUDA requires the triton of its own version.
    sed '/^triton==/d' constraints.txt >.venv/constraints.txt
    "$PYTHON" -m pip install -qq --no-compile "torch==$TORCH" -c .venv/constraints.txt ||
        fail "torch $TORCH could not be installed; $network"
    torch="$TORCH"
fi

# A torch in range that is already there stays, and the triton that came with it, so they take the place of the
# pinned ones.
triton="$("$PYTHON" -c 'from importlib.metadata import version; print(version("triton"))' 2>/dev/null || true)"
sed "s/^torch==.*/torch==$torch/${triton:+; s/^triton==.*/triton==$triton/}" constraints.txt >.venv/constraints.txt
echo "make setup: installing millrace and its dependencies"
"$PYTHON" -m pip install -qq --no-compile "uv==$(pinned uv)" || fail "uv could not be installed; $network"
"$PYTHON" scripts/install.py -e ".[dev]" -c .venv/constraints.txt || fail "the dependencies could not be installed; $network"
# Without what it requires: pyproject.toml names that, except pycosat, which needs a C compiler.
"$PYTHON" scripts/install.py --no-deps "reasoning-gym==$(pinned reasoning_gym)" ||
    fail "reasoning-gym could not be installed; $network"

# Python warns of its `is` with a literal where it compiles it, which is at the first import otherwise.
"$PYTHON" -W ignore -m compileall -qq .venv/lib/python*/site-packages/cellpylib

rm -f .venv/.ready-*
touch "$stamp"
echo "make setup: ready"
