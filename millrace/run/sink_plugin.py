"""A logger of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.data.plugin import Plugin
from millrace.errors import SetupError
from millrace.observability.sinks import Record

INPUTS = ("folder", "settings")
METHODS = ("write", "close")


class SinkPlugin:
    """A `Sink` made by a user's class."""

    def __init__(self, reference: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Make the user's logger; SetupError if that fails, or it lacks a method."""
        self._plugin = Plugin.load("loggers", reference, INPUTS, needs_one=False)
        self._made = self._plugin.make(folder=folder, settings=dict(settings))
        for method in METHODS:
            if not callable(getattr(self._made, method, None)):
                raise SetupError(
                    f"{self._plugin.title} has no method {method}; it needs {' and '.join(METHODS)}"
                )

    def write(self, record: Record) -> None:
        """Pass on a copy of one record; PluginError if its method raises."""
        with self._plugin.called(" in write"):
            self._made.write(dict(record))

    def close(self) -> None:
        """Finish; PluginError if its method raises."""
        with self._plugin.called(" in close"):
            self._made.close()
