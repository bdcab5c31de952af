"""Which kernels count as checked on a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from millrace.kernels import device_record
from millrace.kernels.device_record import checked_kernels, record_path, unchecked_note, write_record

NAME = "NVIDIA H100 80GB HBM3"
CUDA = torch.device("cuda")
ALL = dict.fromkeys(device_record.KERNELS, True)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    checked_kernels.cache_clear()


def test_what_passed_is_used_on_that_type_of_device_alone() -> None:
    assert unchecked_note(CUDA) == (
        f"on {NAME} torch's own operations replace 3 of millrace's 3 GPU kernels, which have not been "
        "checked there (paged_attention, token_logprob, linear_scan); millrace doctor --gpu checks them"
    )
    write_record(NAME, ALL | {"linear_scan": False})
    assert checked_kernels(NAME) == {"paged_attention", "token_logprob"}
    assert device_record.is_checked("token_logprob", CUDA)
    assert not device_record.is_checked("linear_scan", CUDA)
    assert "replace 1 of millrace's 3 GPU kernels" in unchecked_note(CUDA)
    assert not checked_kernels("NVIDIA L4")
    write_record(NAME, ALL)
    assert unchecked_note(CUDA) == unchecked_note(torch.device("cpu")) == ""


@pytest.mark.parametrize("changed", ["torch", "triton", "kernels", "device"])
def test_a_record_counts_for_its_versions(changed: str) -> None:
    path = write_record(NAME, ALL)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {changed: "another"}))
    checked_kernels.cache_clear()
    assert not checked_kernels(NAME)


@pytest.mark.parametrize(
    "damaged", ["", "[]", "{}", '{"passed": 3}', "\x00", '{"passed": {"linear_scan": 1}}']
)
def test_a_damaged_record_is_none(damaged: str) -> None:
    write_record(NAME, ALL).write_text(damaged)
    checked_kernels.cache_clear()
    assert not checked_kernels(NAME)


def test_a_record_without_a_true_value_is_none() -> None:
    path = write_record(NAME, ALL)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"passed": {"linear_scan": 1, "paged_attention": "yes"}}))
    checked_kernels.cache_clear()
    assert not checked_kernels(NAME)


def test_any_name_of_a_device_is_a_file_of_the_folder(tmp_path: Path) -> None:
    for name in ("../../x", "", "a/b", "GeForce RTX 4090"):
        assert record_path(name).parent == tmp_path / "millrace" / "devices"
