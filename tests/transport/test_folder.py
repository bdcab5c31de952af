"""What lies in the folder, when it goes, and what both ends say when the other one is gone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from millrace.transport.folder import FolderReceiver, FolderSender
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import WeightSender
from tests.transport.pieces import MakePair, awkward, bits

CLOSING = {"fingerprint": {}}


def put(sender: FolderSender, seed: int = 0) -> list[Path]:
    sender.put({"version": 1}, iter(awkward(seed)), lambda: CLOSING)
    return sorted(sender._folder.glob("*/*.safetensors"))


@pytest.mark.parametrize(("file_bytes", "num_files"), [(1, 11), (1 << 30, 1)])
def test_the_files_are_safetensors(tmp_path: Path, file_bytes: int, num_files: int) -> None:
    with FolderSender(tmp_path / "weights", deadline_s=20.0, file_bytes=file_bytes) as sender:
        paths = put(sender)
        read = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert len(paths) in (num_files, num_files + 1)
    assert read.keys() == dict(awkward()).keys()
    assert all(read[name].dtype == t.dtype and read[name].shape == t.shape for name, t in awkward())
    assert all(bits(read[name]) == bits(tensor) for name, tensor in awkward())
    assert not (tmp_path / "weights").exists()


@pytest.mark.world
def test_proved_weights_are_removed(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward())
    pair.sender.send(awkward(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.world
def test_pages_are_used_again_once_everybody_has_answered(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), reuse=True)
    inodes = []
    pair.carrier.harm = lambda: inodes.append([p.stat().st_ino for p in tmp_path.glob("*/*.safetensors")])
    pair.sender.send(awkward(1), 1)
    pair.sender.send(awkward(2), 2)
    assert inodes[0] == inodes[1]
    receivers, pair.carrier.receivers = pair.carrier.receivers, []
    pair.carrier.carrier._deadline_s = 0.01
    with pytest.raises(WeightSyncError, match="has not answered"):
        pair.sender.send(awkward(3), 3)
    pair.carrier.carrier._deadline_s = 20.0
    pair.carrier.receivers = receivers
    pair.sender.send(awkward(3), 3)
    assert inodes[2] == inodes[1] != inodes[3]


@pytest.mark.world
def test_a_killed_trainer_leaves_nothing_to_the_next_one(tmp_path: Path) -> None:
    """What others keep in the folder stays."""
    (tmp_path / "mine").mkdir()
    code = (
        "import os, torch; from pathlib import Path\n"
        "from millrace.transport.folder import FolderSender\n"
        f"sender = FolderSender(Path({str(tmp_path)!r}), deadline_s=20.0)\n"
        "sender.put({}, [('a', torch.ones(3))], dict)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 4
    with FolderSender(tmp_path, deadline_s=20.0):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_two_trainers_cannot_share_a_folder(tmp_path: Path) -> None:
    with FolderSender(tmp_path, deadline_s=20.0), pytest.raises(WeightSyncError) as error:
        FolderSender(tmp_path, deadline_s=20.0)
    assert str(error.value) == f"another trainer sends weights through {tmp_path}"


@pytest.mark.world
def test_a_sender_that_dies_is_missed(tmp_path: Path) -> None:
    """Before it sends, while it writes, and after a version that was taken."""
    receiver = FolderReceiver(tmp_path / "weights", deadline_s=0.05)
    path = tmp_path / "weights" / "manifest.json"
    sentence = f"no new weights within 0.05 s (the trainer writes {path} once they are there)"
    with pytest.raises(WeightSyncError) as error:
        receiver.take()
    assert str(error.value) == sentence

    def dying() -> Iterator[tuple[str, Tensor]]:
        yield from awkward()[:3]
        raise KeyboardInterrupt

    with FolderSender(tmp_path / "weights", deadline_s=20.0, file_bytes=1) as sender:
        with pytest.raises(KeyboardInterrupt):
            sender.put({}, dying(), lambda: CLOSING)
        with pytest.raises(WeightSyncError) as error:
            receiver.take()
        assert str(error.value) == sentence
        put(sender)
        assert receiver.take().opening == {"version": 1}
        with pytest.raises(WeightSyncError) as error:
            receiver.take()
        assert str(error.value) == sentence


@pytest.mark.world
def test_a_sampler_that_never_reads_is_missed(tmp_path: Path) -> None:
    with FolderSender(tmp_path, deadline_s=0.05, num_samplers=2) as sender:
        receiver = FolderReceiver(tmp_path, deadline_s=20.0)
        put(sender)
        receiver.take()
        receiver.answer({"error": "", "verify_s": 0.0})
        with pytest.raises(WeightSyncError) as error:
            sender.answers()
    assert str(error.value) == (
        f"sampler 1 of 2 has not answered within 0.05 s (it writes {tmp_path}/{sender._attempt}.1.answer "
        "once it has loaded the weights)"
    )


@pytest.mark.world
@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, make_pair: MakePair, what: str) -> None:
    pair = make_pair(tmp_path, awkward(), file_bytes=200)

    def harm() -> None:
        path = sorted(tmp_path.glob("*/*.safetensors"))[1]
        if what == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.unlink()

    pair.carrier.harm = harm
    sentence = r"00001.safetensors (holds \d+ bytes; \d+ were sent|is in the manifest and not there); it was"
    with pytest.raises(WeightSyncError, match=sentence):
        pair.sender.send(awkward(), 1)
    assert pair.receivers[0].version is None


def test_too_little_room_is_an_error_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with FolderSender(tmp_path, deadline_s=20.0) as sender:
        with pytest.raises(WeightSyncError, match=r"^no room for \d+ bytes in .*: No space left on device$"):
            put(sender)
        assert not (tmp_path / "manifest.json").exists()


def test_a_dtype_that_files_do_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    with FolderSender(tmp_path, deadline_s=20.0) as carrier:
        with pytest.raises(WeightSyncError, match="^weight phase is torch.complex64"):
            WeightSender(carrier).send([("phase", torch.zeros(2, dtype=torch.complex64))], 1)
        assert not (tmp_path / "manifest.json").exists()
