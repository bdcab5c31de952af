"""Engines in processes of their own, asked in turn, so that a busy minute of the machine hits all of them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "RESULT "
LIMIT_S = 900.0  # for one answer; the first includes loading and compiling


@dataclass(frozen=True)
class Command:
    """How an engine's process is started: its script and last words, its Python, and libraries to preload."""

    script: str
    python: str
    words: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


class Worker:
    """A running engine."""

    def __init__(self, command: Command, arguments: list[str], threads: int, log: Path) -> None:
        """Start it and wait until it is loaded.

        Args:
            command: what to run.
            arguments: model folder, dtype, threads and device.
            threads: that numerical libraries may use.
            log: where its messages go.

        Raises:
            SystemExit: it ended or was too slow; its last messages say why.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if command.preload:
            environment["LD_PRELOAD"] = ":".join(command.preload)
        self._script, self._log = command.script, log
        with log.open("w", encoding="utf-8") as messages:
            self._process = subprocess.Popen(
                [command.python, str(HERE / command.script), *arguments, *command.words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=environment,
            )
        self.versions: dict[str, str] = self._answer()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a job and wait for its answer.

        Raises:
            SystemExit: the process ended or was too slow; its last messages say why.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let it end."""
        self._process.communicate(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(LIMIT_S, self._process.kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    told: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return told
        finally:
            alarm.cancel()
        last = self._log.read_text(encoding="utf-8")[-3000:]
        why = f"gave no answer within {LIMIT_S:.0f} s" if self._process.wait() < 0 else "ended"
        raise SystemExit(f"{self._script} {why}; its last messages:\n{last}")
