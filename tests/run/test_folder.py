"""One folder, one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.run.folder import RunFolder, RunFolderError

HOLD = """
import sys
from pathlib import Path
from millrace.run.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_without_a_name_the_first_free_number_is_taken(tmp_path):
    for number in (1, 2, 3):
        with RunFolder.create(str(tmp_path / "runs"), None, "quickstart") as folder:
            assert folder.path == tmp_path / "runs" / f"quickstart-{number}"


def test_an_occupied_name_says_how_to_go_on(tmp_path):
    with RunFolder.create(str(tmp_path), "mine", "quickstart") as folder:
        folder.write_text(folder.recipe, "steps: 1")
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(str(tmp_path), "mine", "quickstart")
    path = tmp_path / "mine"
    sentence = f"run {path} exists; choose another name, or continue it with: millrace resume {path}"
    assert str(caught.value) == sentence


def test_a_folder_that_is_no_run_is_not_called_one(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(str(tmp_path), "mine", "quickstart")
    assert (
        str(caught.value) == f"{tmp_path / 'mine'} exists and is not a run; choose another name, or remove it"
    )
    with pytest.raises(RunFolderError) as caught:
        RunFolder.open(tmp_path / "mine")
    assert str(caught.value) == f"{tmp_path / 'mine'} is not a run folder (it has no recipe.yaml)"


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(str(tmp_path / "file"), "mine", "quickstart")
    assert str(caught.value) == f"run folder {tmp_path / 'file'} cannot be made: File exists"


def test_each_rank_keeps_its_spans_in_the_runs_folder(tmp_path):
    folder, notes = RunFolder(tmp_path / "run"), tmp_path / "notes"
    assert folder.spans_of_ranks() == []
    ranks = [folder, *(RunFolder(notes, shared=folder.path, rank=rank) for rank in range(1, 11))]
    folder.path.mkdir()
    for rank in ranks:
        rank.spans.touch()
    assert folder.spans_of_ranks() == [rank.spans for rank in ranks]
    assert folder.spans_of_ranks()[10].name == "spans-rank-10.jsonl"
    assert {rank.checkpoints for rank in ranks} == {folder.checkpoints}
    assert ranks[1].metrics.parent == notes


@pytest.mark.world
def test_a_second_process_is_kept_out_until_the_first_ends_however_it_ends(tmp_path):
    folder = RunFolder(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for _ in range(2):
            with pytest.raises(RunFolderError) as caught:
                folder.lock()
            assert str(caught.value) == f"run {tmp_path} is being trained by another process"
    finally:
        other.kill()
        other.communicate(timeout=20)
    with folder:
        folder.lock()
        with pytest.raises(RunFolderError, match="is being trained by another process"):
            RunFolder(tmp_path).lock()
    again = RunFolder(tmp_path)
    with again:
        again.lock()
        assert (tmp_path / ".lock").is_file()


def test_a_folder_that_is_gone_cannot_be_locked(tmp_path):
    with pytest.raises(RunFolderError) as caught:
        RunFolder(tmp_path / "gone").lock()
    assert str(caught.value) == f"run folder {tmp_path / 'gone'} cannot be written: No such file or directory"


def test_json_is_written_aside_so_that_half_of_it_is_never_seen(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_json(folder.best, {"checkpoint": "step-000001"})

    def crash(path: Path, to: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.write_json(folder.best, {"checkpoint": "step-000002"})
    assert json.loads(folder.best.read_text()) == {"checkpoint": "step-000001"}
    monkeypatch.undo()
    folder.write_json(folder.best, {"checkpoint": "step-000003"})
    assert json.loads(folder.best.read_text()) == {"checkpoint": "step-000003"}
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("newest", "keep", "also", "left"),
    [
        ("step-000004", 2, [None], ["step-000002", "step-000004", "step-000006"]),
        ("step-000004", 1, ["sft-000003", "step-000000"], ["sft-000003", 0, 4, 6]),
        ("sft-000003", 1, [], ["sft-000003", 0, 2, 4, 6]),
    ],
)
def test_of_the_checkpoints_up_to_the_newest_the_last_stay_and_some_by_name(
    newest, keep, also, left, tmp_path
):
    names = [f"step-00000{n}" for n in (0, 2, 4, 6)] + ["sft-000002", "sft-000003"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    RunFolder(tmp_path).forget(newest, keep=keep, also=also)
    expected = [name if isinstance(name, str) else f"step-00000{name}" for name in left]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == expected


def test_what_else_is_among_the_checkpoints_stays_and_takes_no_ones_place(tmp_path):
    """An environment, or its user, can write into the folder of a run."""
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-000000", "step-000002", "step-000002.bak", "step-notes"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "step-000001").write_bytes(bytes(range(256)))
    (checkpoints / "step-000000.txt").write_bytes(bytes(range(256)))
    RunFolder(tmp_path).forget("step-000002", keep=1, also=[])
    left = ["step-000000.txt", "step-000001", "step-000002", "step-000002.bak", "step-notes"]
    assert sorted(path.name for path in checkpoints.iterdir()) == left


@pytest.mark.parametrize("place", ["metrics.jsonl", "checkpoints/step-000000/x", "evidence/x.safetensors"])
def test_a_run_has_results_once_something_is_recorded_saved_or_kept(place, tmp_path):
    folder = RunFolder.create(str(tmp_path), "run", "recipe")
    (folder.path / "summary.json").write_text("{}", encoding="utf-8")
    folder.metrics.touch()
    folder.checkpoints.mkdir()
    assert not folder.has_results()
    (folder.path / place).parent.mkdir(parents=True, exist_ok=True)
    (folder.path / place).write_text("{}", encoding="utf-8")
    assert folder.has_results()
    folder.remove()
    folder.unlock()
    assert list(tmp_path.iterdir()) == []
