"""Files of a run are checked before they are used, and what is damaged is one sentence."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from millrace.observability.files import (
    FileError,
    Shape,
    check_name,
    check_saved_model,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
    read_manifest,
    read_tensor_header,
    read_text,
    sha256,
)


class Pair(Shape):
    name: str
    share: float


def refused(read, *given, **options) -> str:
    with pytest.raises(FileError) as caught:
        read(*given, **options)
    return str(caught.value)


def test_text_is_utf8_and_damage_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("grün".encode())
    assert read_text(path) == "grün"
    path.write_bytes("grün".encode("latin-1"))
    assert refused(read_text, path) == f"{path} is damaged: byte 2 is not UTF-8; restore it from a copy"
    assert refused(read_text, tmp_path / "b", mend="make it") == (
        f"{tmp_path / 'b'} cannot be read: No such file or directory; make it"
    )
    assert refused(read_text, tmp_path) == f"{tmp_path} is a folder; restore it from a copy"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is not an ordinary file; " in refused(read_bytes, tmp_path / "pipe")


def test_a_file_beyond_all_measure_is_not_read(tmp_path):
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    assert "has 1,099,511,627,776 bytes, more than can be right" in refused(read_bytes, tmp_path / "hole")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"share": NaN}', "not JSON: NaN is not a number"),
        ('{"share": 1e999}', "the number 1e999 is too large"),
        ("[" * 100_000, "not JSON that can be read: it is nested too deeply"),
        ("[]", "input should be an object"),
        ('{"name": 3, "share": 0}', "name: input should be a valid string"),
        ('{"name": "a"}', "share: field required"),
        ('{"name": "a", "share": "inf"}', "share: input should be a finite number"),
    ],
)
def test_json_of_another_shape_is_refused(tmp_path, text, why):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert refused(read_json, path, Pair).startswith(f"{path} is damaged: {why}")


def test_json_of_the_shape_is_read_and_other_fields_are_free(tmp_path):
    (tmp_path / "a.json").write_text('{"name": "a\\ud800", "share": 2, "more": [1]}')
    found = read_json(tmp_path / "a.json", Pair)
    assert (found.name, found.share) == ("a\ud800", 2.0)


def test_numbers_that_are_not_finite_are_read_where_they_are_meant():
    assert parse_json("[NaN]", finite=False)[0] != parse_json("[1]")[0]
    with pytest.raises(ValueError, match="Infinity is not a number"):
        parse_json("[Infinity]")


def test_a_damaged_line_is_an_error_or_left_out_and_a_torn_one_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \xff}\n[2]\n{"a": 3}\n{"a": 4')
    told: list[str] = []
    assert read_json_lines(path, warn=told.append) == [{"a": 1}, {"a": 3}]
    assert told == [
        f"{path}: line 2 is not JSON: byte 6 is not UTF-8 and 1 more; left out",
        f"{path}: the last line is not whole; left out",
    ]
    assert refused(read_json_lines, path) == (
        f"{path} line 2 is not JSON: byte 6 is not UTF-8; mend or remove that line"
    )

    def check(line):
        return "too large" if line["a"] > 2 else None

    path.write_bytes(b'{"a": 1}\n{"a": 3}\n')
    assert refused(read_json_lines, path, check).startswith(f"{path} line 2 is damaged: too large; ")


@pytest.fixture
def tensors(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    return path


def test_a_header_tells_dtypes_and_shapes(tensors):
    found = read_tensor_header(tensors)
    assert {name: (one.dtype, one.shape, one.num_elements) for name, one in found.items()} == {
        "a": ("F32", (2, 3), 6),
        "b": ("BF16", (4,), 4),
    }


def header(**entries) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff" * 9, "its header would have 18,446,744,073,709,551,615 bytes, and the file has 9"),
        (b"abc", "its header would have 6,513,249 bytes, and the file has 3"),
        (header(a=3), "its header lacks tensor a"),
        (header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), "gives tensor a no dtype, shape"),
        (header(a={"dtype": "X", "shape": [1], "data_offsets": [0, 4]}), "gives tensor a no dtype, shape"),
        (header(a={"dtype": "F32", "shape": [9**30], "data_offsets": [0, 4]}), "a place that is not of its"),
        (header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}), "have 4 bytes, and 0 are there"),
        (
            header(
                a={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                b={"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            )
            + bytes(6),
            "its tensors overlap, or leave a gap",
        ),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, content, why):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    said = refused(read_tensor_header, path)
    assert said.startswith(f"{path} is damaged: ") and why in said, said


def test_a_cut_file_of_weights_is_refused(tensors):
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "its tensors have 32 bytes, and 31 are there; " in refused(read_tensor_header, tensors)


def test_a_model_in_a_checkpoint_is_compared_with_what_was_saved(tmp_path):
    model = tmp_path / "step-000001" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    check_saved_model(model)  # no checkpoint
    entry = {"bytes": 2, "sha256": sha256(model / "config.json")}
    manifest = model.parent / "manifest.json"
    manifest.write_text(json.dumps({"files": {"model/config.json": entry}}))
    check_saved_model(model)
    (model / "config.json").write_text("[]")
    assert refused(check_saved_model, model) == (
        f"checkpoint {model.parent} is damaged: model/config.json is not what was saved; "
        "take another checkpoint than step-000001"
    )
    manifest.write_text(json.dumps({"files": {"../config.json": entry}}))
    assert "it names a file elsewhere" in refused(read_manifest, model.parent)


def test_names_that_libraries_cannot_write_to_are_refused():
    assert check_name("runs/grün 数") is None
    assert check_name("gr\udcfcn") == r"the name gr\udcfcn is not UTF-8; choose another one"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "a").touch(mode=stat.S_IWUSR)
    assert refused(read_bytes, tmp_path / "a").startswith(
        f"{tmp_path / 'a'} cannot be read: Permission denied"
    )
