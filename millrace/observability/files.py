"""Validated reading of files that a run wrote.

The error for a damaged file names the file, the damage and the fix. Text is UTF-8 in any locale.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from millrace.observability.plain import plain_text

Kind = TypeVar("Kind")

MANIFEST = "manifest.json"
RESTORE = "restore it from a copy"
# Text files are smaller than this; a larger file is not read into memory.
MAX_TEXT_BYTES = 1 << 31
MAX_HEADER_BYTES = 100_000_000
MAX_PATH_SHOWN = 300
# Depth of a model or adapter folder below its checkpoint.
MAX_DEPTH = 2
# Bits of a number by its name in the header of a safetensors file.
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class FileError(ValueError):
    """A file cannot be used; the message names the file and the fix."""


class Shape(BaseModel):
    """What a JSON file must hold: fields of their types, with finite numbers; other fields are free."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Digest(Shape):
    """Size and SHA-256 of a file."""

    bytes: NonNegativeInt
    sha256: str


class Manifest(Shape):
    """The files of a folder by their names in it."""

    files: dict[str, Digest]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, as the header has it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def shown(path: str | Path) -> str:
    """A path as messages write it."""
    return plain_text(str(path), MAX_PATH_SHOWN)


def notice(text: str) -> None:
    """Print a note to standard error, such as about data that was left out."""
    sys.stderr.write(f"note: {plain_text(text, 1000)}\n")


def read_bytes(path: Path, *, mend: str = RESTORE) -> bytes:
    """The bytes of an ordinary file, or FileError; `mend` is the fix for the message."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "not an ordinary file"
            raise FileError(f"{shown(path)} is {what}; {mend}")
        if status.st_size > MAX_TEXT_BYTES:
            raise FileError(f"{shown(path)} has {status.st_size:,} bytes, more than can be right; {mend}")
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{shown(path)} cannot be read: {error.strerror or error}; {mend}") from None


def read_text(path: Path, *, mend: str = RESTORE) -> str:
    """The text of a UTF-8 file, in any locale; FileError as `read_bytes`, or if it is not UTF-8."""
    content = read_bytes(path, mend=mend)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{shown(path)} is damaged: byte {error.start} is not UTF-8; {mend}") from None


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON; unless `finite` is off, reject infinity and NaN. ValueError has the reason in one line."""
    try:
        return json.loads(text, **(_FINITE if finite else {}))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _not_finite(word: str) -> float:
    raise ValueError(f"not JSON: {word} is not a number")


_FINITE: dict[str, Any] = {"parse_constant": _not_finite, "parse_float": _finite}


def read_json(path: Path, kind: type[Kind], *, mend: str = RESTORE, finite: bool = True) -> Kind:
    """Read a JSON file as a `Shape`, a dataclass, or a type such as `dict[str, str]`; FileError if it is not.

    Infinite numbers and NaN are rejected unless `finite` is off; `mend` is the fix for the message.
    """
    text = read_text(path, mend=mend)
    try:
        return checked(kind, parse_json(text, finite=finite))
    except ValueError as error:
        raise FileError(f"{shown(path)} is damaged: {plain_text(str(error))}; {mend}") from None


def checked(kind: type[Kind], value: Any) -> Kind:
    """Validate a value as a type; ValueError has its first mistake in one line."""
    # Looked up by its class, not by the hash of its values.
    adapter: TypeAdapter[Kind] = _adapter(kind)  # type: ignore[arg-type]
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    # Names of our classes mean nothing to a user.
    is_object = found["type"] in ("model_type", "model_attributes_type", "dataclass_type", "dict_type")
    message = "input should be an object" if is_object else found["msg"][:1].lower() + found["msg"][1:]
    return plain_text(f"{place}: {message}" if place else message, 200)


def read_json_lines(
    path: Path,
    check: Callable[[Mapping[str, Any]], str | None] = lambda line: None,
    *,
    warn: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that has no line break.

    Such a line is still being written, or was cut by a kill. `check` returns what is wrong with an object,
    or None. A damaged line is a FileError; with `warn`, which takes a message, it is skipped.
    """
    *lines, rest = read_bytes(path).split(b"\n")
    found, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_object(line, check))
        except ValueError as error:
            reason = f"line {number} is {plain_text(str(error), 200)}"
            if warn is None:
                raise FileError(f"{shown(path)} {reason}; mend or remove that line") from None
            damaged.append(reason)
    if warn is not None and damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(f"{shown(path)}: {damaged[0]}{more}; left out")
    if warn is not None and rest:
        warn(f"{shown(path)}: the last line is not whole; left out")
    return found


def _object(line: bytes, check: Callable[[Mapping[str, Any]], str | None]) -> dict[str, Any]:
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if (wrong := check(value)) is not None:
        raise ValueError(f"damaged: {wrong}")
    return value


def read_tensor_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; FileError if it is cut or damaged. No tensor is read."""
    try:
        if not path.is_file():
            raise FileError(f"{shown(path)} is not a file; {RESTORE}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            num_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or num_bytes > min(size - 8, MAX_HEADER_BYTES):
                reason = f"its header would have {num_bytes:,} bytes, and the file has {size:,}"
                raise FileError(f"{shown(path)} is damaged: {reason}; {RESTORE}")
            header = file.read(num_bytes)
    except OSError as error:
        raise FileError(f"{shown(path)} cannot be read: {error.strerror or error}; {RESTORE}") from None
    try:
        return _tensors(parse_json(header), size - 8 - num_bytes)
    except ValueError as error:
        raise FileError(f"{shown(path)} is damaged: {plain_text(str(error), 300)}; {RESTORE}") from None


def _tensors(header: Any, num_bytes: int) -> dict[str, StoredTensor]:
    """Check too that the tensors cover `num_bytes` bytes without a gap."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    found, places = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"its header lacks tensor {name}")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        bits = DTYPE_BITS.get(str(entry.get("dtype")))
        if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and bits):
            raise ValueError(f"its header gives tensor {name} no dtype, shape and place that can be")
        if math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
            raise ValueError(f"its header gives tensor {name} a place that is not of its size")
        found[name] = StoredTensor(entry["dtype"], tuple(shape))
        places.append(tuple(offsets))
    end = 0
    for begin, after in sorted(places):
        if begin != end:
            raise ValueError("its tensors overlap, or leave a gap")
        end = after
    if end != num_bytes:
        raise ValueError(f"its tensors have {end:,} bytes, and {num_bytes:,} are there")
    return found


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def read_manifest(folder: Path, *, mend: str = RESTORE) -> dict[str, Digest]:
    """The files that a folder must hold, by name; FileError if its manifest is missing or damaged."""
    found = read_json(folder / MANIFEST, Manifest, mend=mend).files
    for name, entry in found.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not name:
            raise FileError(f"{shown(folder / MANIFEST)} is damaged: it names a file elsewhere; {mend}")
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise FileError(f"{shown(folder / MANIFEST)} is damaged: {name} has no SHA-256; {mend}")
    return found


def first_changed(folder: Path, entries: Mapping[str, Digest]) -> str | None:
    """Return the first file that differs from the manifest, and why; None if none does. Reads every byte."""
    for name, entry in entries.items():
        try:
            if (folder / name).stat().st_size != entry.bytes or sha256(folder / name) != entry.sha256:
                return f"{plain_text(name)} is not what was saved"
        except OSError as error:
            return f"{plain_text(name)} cannot be read: {error.strerror or error}"
    return None


def sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_saved_model(folder: Path) -> None:
    """Compare a model folder with the manifest of its checkpoint, if in one; FileError if it differs."""
    folder = folder.resolve()
    above = next((path for path in (*folder.parents,)[:MAX_DEPTH] if (path / MANIFEST).is_file()), None)
    if above is None:
        return
    mend = f"take another checkpoint than {shown(above.name)}"
    prefix = f"{folder.relative_to(above).as_posix()}/"
    entries = {n: e for n, e in read_manifest(above, mend=mend).items() if n.startswith(prefix)}
    changed = first_changed(above, entries)
    if changed is not None:
        raise FileError(f"checkpoint {shown(above)} is damaged: {changed}; {mend}")


def check_name(path: str | Path) -> str | None:
    """What forbids to use a path for a run; None where nothing does.

    Libraries that write a run's files take their names as UTF-8 alone.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return f"the name {shown(path)} is not UTF-8; choose another one"
    return f"the name {shown(path)} holds a NUL; choose another one" if "\0" in str(path) else None


def finite(value: Any) -> bool:
    """Whether a value read from a file is a number that is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def count(value: Any) -> bool:
    """Whether a value read from a file counts something: 0, 1, 2, ..."""
    return type(value) is int and value >= 0


def paths_within(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Files named by another file of a folder; FileError if a name points outside the folder."""
    for name in names:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise FileError(
                f"{shown(folder)} names the file {plain_text(name, 100)}, which lies elsewhere; {RESTORE}"
            )
        yield folder / name
