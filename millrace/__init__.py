"""millrace trains language models with reinforcement learning.

from millrace import load_recipe, train
report = train(load_recipe("quickstart", {"steps": 50}))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.config.recipe import load_recipe
    from millrace.config.settings import RunConfig
    from millrace.run.loop import resume, train
    from millrace.run.progress import RunReport

__all__ = ["RunConfig", "RunReport", "__version__", "load_recipe", "resume", "train"]

_HOME = {
    "load_recipe": "millrace.config.recipe",
    "RunConfig": "millrace.config.settings",
    "RunReport": "millrace.run.progress",
    "resume": "millrace.run.loop",
    "train": "millrace.run.loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import millrace` stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
