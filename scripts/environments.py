"""Environments of other packages beside the project's own (`.venv-NAME`), made where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(name: str, *commands: Sequence[str]) -> Path:
    """Return the folder of an environment's programs; `commands` are the arguments of pip, in order.

    One whose installation was cut off is installed again.
    """
    folder = ROOT / f".venv-{name}"
    if not (folder / ".ready").exists():
        print(f"making {folder} (some minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for words in commands:
            subprocess.run([*pip, *words], check=True)
        (folder / ".ready").touch()
    return folder / "bin"
