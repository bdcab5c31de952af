"""Runs one test of a program's functions inside a sandbox, so that the program cannot forge the result.

The sandbox runs this file, the tester. It starts the program in a process of its own, by a new start of
Python, since a forked process would have the test in its memory. The test never leaves the tester: it reaches
the program's functions through a pipe, and only plain values (numbers, texts, bytes, lists, tuples, sets,
dictionaries) come back, copied. So a program that exits, replaces functions of Python, registers an exit
handler or returns objects that equal everything can end its own process or return a value, and nothing else.
The tester's memory and descriptors are closed to the program (`PR_SET_DUMPABLE`), and the tester imports
nothing from the folder that the program can write to.

Standard input is one JSON object: `program`, `test` and `nonce`. The last line of standard output is
`nonce verdict reason`, the reason as JSON, with the verdict `passed`, `wrong`, or `unsupported` if the test
cannot be run this way.

It imports only the standard library, and is no part of what this process imports.
"""

from __future__ import annotations

import builtins
import ctypes
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, NoReturn

_PR_SET_DUMPABLE = 4
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 4 << 20
_MAX_ITEMS = 100_000
_PROGRAM = "program"


class ProgramFault(BaseException):
    """The program has ended, or returned what no test can use; no `except Exception` of a test catches it."""


class Unsupported(BaseException):
    """The test cannot be run this way."""


def send(pipe: IO[bytes], message: Any) -> None:
    """Write a message."""
    body = json.dumps(message).encode()
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def receive(pipe: IO[bytes], max_bytes: int = 1 << 32) -> Any:
    """Read a message; EOFError if there is none any more, ValueError if it is none."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise ValueError(f"a message of {length:,} bytes")
    body = pipe.read(length)
    if len(body) < length:
        raise EOFError
    return json.loads(body)


_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, other: Any) -> Any:
    """Encode a plain value as JSON data; `other` encodes what is not plain."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return ["bytes", value.decode("latin-1")]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *([encode(key, other), encode(item, other)] for key, item in value.items())]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, *(encode(item, other) for item in value)]
    return other(value)


def decode(data: Any, other: Any) -> Any:
    """Decode the result of `encode`; ValueError for anything else."""
    if not isinstance(data, list):
        return data
    name, *items = data
    if name == "bytes":
        return items[0].encode("latin-1")
    if name == "complex":
        return complex(*items)
    if name == "dict":
        return {decode(key, other): decode(item, other) for key, item in items}
    if name in _CONTAINERS:
        return _CONTAINERS[name](decode(item, other) for item in items)
    if name == "object":
        return other(items)
    raise ValueError(f"{name!r} is no kind of value")


# ---- the program's process


def serve_program() -> NoReturn:
    """Load the program and do what the tester asks, until it closes the pipe."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    sys.argv, sys.path[:] = [_PROGRAM], [*sys.path, os.getcwd()]
    module = sys.modules[_PROGRAM] = ModuleType(_PROGRAM)
    objects: list[Any] = []
    request = receive(requests)
    try:
        FunctionType(compile(request, _PROGRAM, "exec"), vars(module))()
        send(replies, {"value": None})
        while True:
            try:
                send(replies, _perform(receive(requests), vars(module), objects))
            except (EOFError, BrokenPipeError):
                os._exit(0)
    except BaseException as error:
        send(replies, _raised(error))
    os._exit(1)


def _perform(request: list[Any], names: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    """Do one request and return its reply."""

    def keep(value: Any) -> Any:
        objects.append(value)
        return ["object", len(objects) - 1, type(value).__name__]

    def kept(items: list[Any]) -> Any:
        return objects[items[0]]

    action, target, *given = request
    reply: dict[str, Any] = {}
    try:
        if action == "name":
            if target not in names:
                return {"missing": True}
            value = names[target]
        elif action == "call":
            args, named = decode(given[0], kept), decode(given[1], kept)
            value = objects[target](*args, **named)
            reply["given"] = encode(args, keep)
        elif action == "attribute":
            value = getattr(objects[target], given[0])
        elif action == "item":
            value = objects[target][decode(given[0], kept)]
        elif action == "length":
            value = len(objects[target])
        else:
            value = list(itertools.islice(objects[target], _MAX_ITEMS))
        return reply | {"value": encode(value, keep)}
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:200]
    except Exception:
        text = ""
    return {"raised": type(error).__name__, "text": text}


# ---- the tester's process


class Program:
    """The program's process, as the tester sees it."""

    def __init__(self, source: str, text: str) -> None:
        self.ended = ""
        self.num_names = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.ask(text)

    def ask(self, request: Any) -> Any:
        """Send a request and return the reply's value; raise what the program raised."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        try:
            send(requests, request)
            reply = receive(replies, _MAX_MESSAGE_BYTES)
            if "missing" in reply:
                raise KeyError
            if "raised" not in reply:
                if "given" in reply:
                    return decode(reply["value"], self._object), decode(reply["given"], self._object)
                return decode(reply["value"], self._object)
            kind, text = getattr(builtins, reply["raised"], None), f"{reply['raised']}: {reply['text']}"
        except KeyError:
            raise
        except (EOFError, BrokenPipeError):
            self.ended = "the program ended before the test"
            raise ProgramFault(self.ended) from None
        except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
            self.ended = f"the program returned what cannot be read: {error}"
            raise ProgramFault(self.ended) from None
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(reply["text"])
        raise RuntimeError(text)

    def name(self, name: str) -> Any:
        """Return a global name of the program; KeyError if it has none."""
        value = self.ask(["name", name])
        self.num_names += 1
        return value

    def end(self) -> None:
        """Kill the program."""
        self._process.kill()

    def _object(self, items: list[Any]) -> ProgramObject:
        return ProgramObject(self, int(items[0]), str(items[1])[:100])


class ProgramObject:
    """A function, class or object of the program. It is no plain value, so it equals nothing."""

    def __init__(self, program: Program, number: int, kind: str) -> None:
        self.__program, self.__number, self.__kind = program, number, kind

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call it; what it changes in lists, dictionaries and sets is changed here, too."""
        sent = encode(list(args), self.__sent), encode(named, self.__sent)
        value, given = self.__program.ask(["call", self.__number, *sent])
        for mine, theirs in zip(args, given, strict=True):
            if isinstance(mine, list) and isinstance(theirs, list):
                mine[:] = theirs
            elif isinstance(mine, dict | set) and type(mine) is type(theirs):
                mine.clear()
                mine.update(theirs)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask(["attribute", self.__number, name])

    def __getitem__(self, key: Any) -> Any:
        return self.__program.ask(["item", self.__number, encode(key, self.__sent)])

    def __len__(self) -> int:
        return int(self.__program.ask(["length", self.__number]))

    def __bool__(self) -> bool:
        try:
            return len(self) > 0
        except TypeError:
            return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__program.ask(["items", self.__number]))

    def __contains__(self, item: object) -> bool:
        return item in list(self)

    def __eq__(self, other: object) -> bool:
        raise ProgramFault(f"the program returned an object of class {self.__kind}, which cannot be compared")

    def __sent(self, value: Any) -> Any:
        if isinstance(value, ProgramObject):
            return ["object", value.__number]
        raise Unsupported(f"it gives the program an object of class {type(value).__name__}")


def names_in(code: CodeType) -> set[str]:
    """Return the names that code and its functions use."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def try_test(source: str, request: dict[str, str]) -> tuple[str, str]:
    """Run the test; return verdict and reason."""
    code = compile(request["test"], "test", "exec")
    known: dict[str, Any] = {"__name__": "test"}
    try:
        program = Program(source, request["program"])
    except (ProgramFault, Exception) as error:
        return "wrong", f"the program does not load: {error}"
    try:
        # Python's own names are not taken from the program, which could change what `abs` or `set` are.
        for name in sorted(names_in(code) - set(dir(builtins))):
            with suppress(KeyError):  # a name of the test's own, or an attribute
                known[name] = program.name(name)
        FunctionType(code, known)()
    except Unsupported as error:
        return "unsupported", str(error)
    except BaseException as error:
        return "wrong", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    finally:
        program.end()
    if program.ended:
        return "wrong", program.ended
    # Such a test passes with any program.
    return ("passed", "") if program.num_names else ("unsupported", "it passes without a name of the program")


def main() -> None:
    """Read the request, and write the verdict."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != os.getcwd()]
    with open(__file__, encoding="utf-8") as file:
        source = file.read()
    verdicts = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    request = json.load(sys.stdin)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    verdict, reason = try_test(source, request)
    os.write(verdicts, f"{request['nonce']} {verdict} {json.dumps(reason[:500])}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[-1] == _PROGRAM:
        serve_program()
    else:
        main()
