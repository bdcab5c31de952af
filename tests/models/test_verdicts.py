"""Verdicts of trials: found once, kept where right, found anew after damage or with other code."""

from __future__ import annotations

from pathlib import Path

from millrace.models.verdicts import Verdicts, verdicts


class Trial:
    """Counts how often it was asked."""

    def __init__(self, problem: str) -> None:
        self.problem, self.asked = problem, 0

    def __call__(self) -> str:
        self.asked += 1
        return self.problem


def test_what_was_found_right_is_known_to_another_process(tmp_path: Path) -> None:
    wrong, right = Trial("it is wrong"), Trial("")
    for _ in range(2):
        known = Verdicts([tmp_path], "v1")
        for _ in range(2):
            assert (known.of("a", wrong), known.of("b", right)) == ("it is wrong", "")
    assert right.asked == 1
    # Once in each process: the problem may have been the machine's.
    assert wrong.asked == 2


def test_other_code_finds_anew(tmp_path: Path) -> None:
    Verdicts([tmp_path], "v1").of("a", Trial(""))
    assert Verdicts([tmp_path], "v2").of("a", Trial("it is wrong")) == "it is wrong"


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    trial = Trial("")
    Verdicts([tmp_path], "v1").of("a", trial)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-3], b"{}", whole.replace(b'"a"', b'"x"'), b"\xff" * 20):
        file.write_bytes(damaged)
        assert Verdicts([tmp_path], "v1").of("a", trial) == ""
        assert file.read_bytes() == whole
    assert trial.asked == 6


def test_without_a_folder_a_process_still_asks_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    known, trial = Verdicts([file / "below"], "v1"), Trial("")
    assert known.of("a", trial) == known.of("a", trial) == ""
    assert trial.asked == 1


def test_the_first_folder_that_can_be_written_to_is_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    Verdicts([file / "below", tmp_path / "second"], "v1").of("a", Trial(""))
    assert len(list((tmp_path / "second").iterdir())) == 1
    assert verdicts() is verdicts()
