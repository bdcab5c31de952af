"""Install packages with uv from pip's indexes, in a fifth of pip's time; with pip where uv cannot.

python scripts/install.py -e ".[dev]" -c constraints.txt    # arguments are pip's
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence

# uv reads its own variables, and none of pip's settings.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
# Of pip's sections, the later ones have precedence.
SECTIONS = ("global", "install", ":env:")


def uv_variables(listed: str) -> dict[str, str]:
    """The variables of uv for what `pip config list` printed."""
    found = dict[str, str]()
    for section in SECTIONS:
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            name = key.removeprefix(f"{section}.")
            if name != key and name in VARIABLES:
                words = str(ast.literal_eval(value)).split()
                found[VARIABLES[name]] = ("," if name == "find-links" else " ").join(words)
    return found


def main(arguments: Sequence[str]) -> int:
    """Install; return the exit code of what installed."""
    python = sys.executable
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    # As pip, uv is to take the best version of all indexes, not of the first that has the package.
    uv = [
        python,
        "-m",
        "uv",
        "pip",
        "install",
        "-q",
        "--python",
        python,
        "--index-strategy",
        "unsafe-best-match",
    ]
    environment = uv_variables(listed.stdout) | os.environ
    if subprocess.run([*uv, *arguments], env=environment, check=False).returncode == 0:
        return 0
    print("make setup: uv could not, so pip installs, which takes longer", flush=True)
    pip = [python, "-m", "pip", "install", "-qq", "--no-compile"]
    return subprocess.run([*pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
