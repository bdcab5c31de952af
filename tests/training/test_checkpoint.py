"""A checkpoint is whole or it is not there, and a damaged one is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from millrace.errors import CheckpointError
from millrace.training.checkpoint import (
    newest_checkpoint,
    read_state,
    remove_checkpoint,
    verify_checkpoint,
    write_checkpoint,
    write_state,
)


class Crash(BaseException):
    """The process dies here: nothing after this line runs."""


def save(folder: Path, order: int, *, fill=None) -> Path:
    def default(aside: Path) -> None:
        (aside / "model").mkdir()
        (aside / "model" / "model.safetensors").write_bytes(bytes([order]) * 100)
        (aside / "optimizer.safetensors").write_bytes(bytes([order]) * 60)
        write_state(aside, {"order": order, "step": 10 * order})

    path = folder / f"step-{order:06d}"
    write_checkpoint(path, fill or default)
    return path


def crash_at(monkeypatch, owner, name: str, at: int) -> list[int]:
    """Let the `at`-th call of a function, from 1, be the moment of the crash; the count is given back."""
    real, calls = getattr(owner, name), [0]

    def counted(*arguments, **named):
        calls[0] += 1
        if calls[0] == at:
            raise Crash
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)
    return calls


STEPS = [(os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "mkdir"), (Path, "stat")]


def num_calls(owner, name: str, work) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = crash_at(patch, owner, name, at=-1)
        work()
    return calls[0]


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_after_a_crash_at_any_moment_a_new_checkpoint_is_absent_or_whole(owner, name, tmp_path):
    moments = num_calls(owner, name, lambda: save(tmp_path / "counted", 2))
    assert moments >= 1
    for at in range(1, moments + 1):
        folder = tmp_path / f"run-{at}"
        before = save(folder, 1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, owner, name, at)
            save(folder, 2)
        verify_checkpoint(before)
        newest, refused = newest_checkpoint(folder)
        assert refused == []
        assert newest in (before, folder / "step-000002")
        # The process that comes next is not disturbed by what the crash left.
        assert newest_checkpoint(save(folder, 2).parent) == (folder / "step-000002", [])
        assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(("owner", "name"), STEPS[:2], ids=["fsync", "rename"])
def test_after_a_crash_while_a_damaged_one_is_redone_the_one_before_is_whole(owner, name, tmp_path):
    def damaged(folder: Path) -> Path:
        before = save(folder, 1)
        (save(folder, 2) / "state.json").unlink()
        return before

    damaged(tmp_path / "counted")
    moments = num_calls(owner, name, lambda: save(tmp_path / "counted", 2))
    assert newest_checkpoint(tmp_path / "counted") == (tmp_path / "counted" / "step-000002", [])
    for at in range(1, moments + 1):
        folder = tmp_path / f"run-{at}"
        before = damaged(folder)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, owner, name, at)
            save(folder, 2)
        newest, _ = newest_checkpoint(folder)
        assert newest in (before, folder / "step-000002")
        assert newest_checkpoint(save(folder, 2).parent) == (folder / "step-000002", [])


@pytest.mark.parametrize("name", ["rename", "unlink", "rmdir"])
def test_after_a_crash_at_any_moment_a_removed_checkpoint_is_whole_or_gone(name, tmp_path):
    owner = Path if name == "rename" else os
    counted = save(tmp_path / "counted", 1)
    moments = num_calls(owner, name, lambda: remove_checkpoint(counted))
    assert moments >= 1
    for at in range(1, moments + 1):
        folder = tmp_path / f"run-{at}"
        old, new = save(folder, 1), save(folder, 2)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, owner, name, at)
            remove_checkpoint(old)
        assert newest_checkpoint(folder) == (new, [])
        if old.exists():
            verify_checkpoint(old)
            remove_checkpoint(old)
        save(folder, 3)
        assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]


def test_the_redo_of_a_damaged_one_replaces_every_file_of_it(tmp_path):
    path = save(tmp_path, 3)
    (path / "model" / "model.safetensors").write_bytes(b"x")
    (path / "left over").write_text("old")
    save(tmp_path, 3)
    verify_checkpoint(path)
    assert not (path / "left over").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0b100
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda p: flip(p / "model" / "model.safetensors"),
            "is damaged: model/model.safetensors is not what was saved",
        ),
        (
            lambda p: os.truncate(p / "optimizer.safetensors", 20),
            "is damaged: optimizer.safetensors is not what was saved",
        ),
        (lambda p: (p / "state.json").unlink(), "is damaged: state.json is missing"),
        (lambda p: (p / "model" / "more.txt").write_text(""), "is damaged: model/more.txt is extra"),
        (lambda p: (p / "manifest.json").unlink(), "has no readable manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"files": '), "has no readable manifest.json"),
        (lambda p: (p / "manifest.json").write_text("[]"), "has no readable manifest.json"),
    ],
    ids=["bit", "cut", "missing", "extra", "no manifest", "half a manifest", "other manifest"],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(spoil, sentence, tmp_path):
    before, path = save(tmp_path, 1), save(tmp_path, 2)
    spoil(path)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    assert str(caught.value) == f"checkpoint {path} {sentence}"
    assert newest_checkpoint(tmp_path) == (before, [f"checkpoint {path} {sentence}"])


def test_newest_goes_by_order_and_not_by_name_or_time(tmp_path):
    third, first = save(tmp_path, 3), save(tmp_path, 1)
    os.utime(first, (2e9, 2e9))
    renamed = third.rename(tmp_path / "a")
    assert newest_checkpoint(tmp_path) == (renamed, [])


def test_without_checkpoints_there_is_no_newest(tmp_path):
    assert newest_checkpoint(tmp_path / "none") == (None, [])
    (tmp_path / "a file").write_text("")
    assert newest_checkpoint(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")]
)
def test_a_full_disk_is_said_and_leaves_what_was_saved_before(number, reason, tmp_path):
    before = save(tmp_path, 1)

    def fill(aside: Path) -> None:
        (aside / "model").mkdir()
        (aside / "model" / "half").write_bytes(b"half")
        raise OSError(number, reason)

    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, fill=fill)
    path = tmp_path / "step-000002"
    sentence = f"checkpoint {path} cannot be written: {reason}; what was saved before is intact"
    assert str(caught.value) == sentence
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    verify_checkpoint(before)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_disk_that_fills_up_while_flushing_leaves_what_was_saved_before(at, tmp_path, monkeypatch):
    before = save(tmp_path, 1)
    real, calls = os.fsync, [0]

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device; what was saved before is intact$"):
        save(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == (before, [])


def test_files_are_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    seen: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_fsync(handle)

    def rename(path: Path, to: Path) -> Path:
        seen.append(f"rename to {to.name}")
        return real_rename(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, 1)
    at = seen.index("rename to step-000001")
    written = {"model.safetensors", "state.json", "optimizer.safetensors", "manifest.json"}
    assert set(seen[:at]) == written | {"model", ".aside-step-000001"}
    assert seen[at + 1 :] == [tmp_path.name]


def test_the_state_comes_back_and_every_file_is_in_the_manifest(tmp_path):
    path = save(tmp_path, 4)
    assert read_state(path) == {"order": 4, "step": 40}
    manifest = json.loads((path / "manifest.json").read_text())
    files = manifest["files"]
    assert sorted(files) == ["model/model.safetensors", "optimizer.safetensors", "state.json"]
    assert files["model/model.safetensors"]["bytes"] == 100


def test_a_state_that_is_not_json_is_refused_by_name(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        read_state(path)
    assert str(caught.value) == f"checkpoint {path} has no readable state.json"
