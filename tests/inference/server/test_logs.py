"""What the server logs cannot be forged, and does not flood."""

from __future__ import annotations

import logging

from millrace.inference.server.logs import INTERVAL_S, MAX_KINDS, MAX_RECORD, CleanFormatter, FewOfAKind


def record(message: str, *values: object, error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("uvicorn.error", logging.ERROR, "file", 1, message, values, info)


def test_a_line_that_a_client_made_up_stays_within_its_record():
    text = CleanFormatter("%(levelname)s: %(message)s").format(
        record("bad %s", "\x1b[2J\nERROR: forged\r\x07")
    )
    assert text == "ERROR: bad \\x1b[2J\n    ERROR: forged\n    \\x07"


def test_letters_of_every_language_stay():
    assert CleanFormatter().format(record("käse 水車 \ud800")) == "käse 水車 \\ud800"


def test_a_long_record_loses_its_middle():
    text = CleanFormatter().format(record("%s", "a" * 10_000_000))
    assert len(text) < MAX_RECORD + 100
    assert f"[{10_000_000 - MAX_RECORD} more characters]" in text


def test_one_record_of_a_kind_in_an_interval_and_the_next_counts_the_others():
    now_s = [0.0]
    few = FewOfAKind(lambda: now_s[0])
    passed = [few.filter(record("Invalid HTTP request received.")) for _ in range(50)]
    assert passed == [True] + [False] * 49
    assert few.filter(record("Unsupported upgrade request."))
    now_s[0] = INTERVAL_S
    again = record("Invalid HTTP request received.")
    assert few.filter(again)
    assert again.getMessage() == "Invalid HTTP request received. (49 more like this in the last 10 s)"


def test_errors_that_arise_at_different_places_are_different_kinds():
    few = FewOfAKind(lambda: 0.0)

    def caught(text: str) -> Exception:
        try:
            int(text)
        except ValueError as error:
            return error
        raise AssertionError

    def caught_elsewhere() -> Exception:
        try:
            int("c")
        except ValueError as error:
            return error
        raise AssertionError

    errors = [caught("a"), caught("b"), caught_elsewhere()]
    assert [few.filter(record("failed", error=error)) for error in errors] == [True, False, True]


def test_kinds_that_a_client_makes_up_are_forgotten():
    few = FewOfAKind(lambda: 0.0)
    for number in range(3 * MAX_KINDS):
        few.filter(record(f"made up {number}"))
    assert len(few._seen) <= MAX_KINDS
