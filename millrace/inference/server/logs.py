"""Log formatting: records of bounded length without control characters, rate-limited by kind.

Text from a client can reach the log in an error message. It must not forge lines, control the terminal or
fill the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

MAX_RECORD = 20_000
INTERVAL_S = 10.0
# Kinds that are remembered; what a client makes up must not grow without bound.
MAX_KINDS = 256


class CleanFormatter(logging.Formatter):
    """Control characters are escaped, a long record loses its middle, and further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        text = super().format(record)
        if len(text) > MAX_RECORD:
            half = MAX_RECORD // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} more characters]\n{text[-half:]}"
        return "\n    ".join(printable(line) for line in text.splitlines())


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would not print as a character."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


class FewOfAKind(logging.Filter):
    """Passes one record of a kind in `INTERVAL_S`; the next one has the number of those dropped.

    A kind is a logger, the first line of the message before its arguments, and the place where an exception
    arose.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # When the last record of a kind passed, and how many have not since.
        self._seen: dict[Any, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        now_s, kind = self._clock(), _kind(record)
        passed_s, left_out = self._seen.get(kind, (-INTERVAL_S, 0))
        if now_s - passed_s < INTERVAL_S:
            self._seen[kind] = passed_s, left_out + 1
            return False
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = now_s, 0
        if left_out:
            record.msg = (
                f"{str(record.msg).rstrip()} ({left_out} more like this in the last {now_s - passed_s:.0f} s)"
            )
        return True


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    first = str(record.msg).split("\n", 1)[0]
    if not record.exc_info or record.exc_info[1] is None:
        return record.name, first
    trace = record.exc_info[1].__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return record.name, first, record.exc_info[0], place


# For uvicorn. Of asyncio come failures of accept and of callbacks.
LOG_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"few": {"()": FewOfAKind}},
    "formatters": {"clean": {"()": CleanFormatter, "format": "%(levelname)s: %(message)s"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "clean",
            "filters": ["few"],
            "stream": "ext://sys.stderr",
        }
    },
    "loggers": {
        name: {"handlers": ["stderr"], "level": "WARNING", "propagate": True}
        for name in ("uvicorn", "asyncio", "millrace.inference.server", "millrace.engines")
    },
}
