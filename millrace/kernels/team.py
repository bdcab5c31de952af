"""Compiled parallel loops on torch's OpenMP threads.

Between two products torch's OpenMP threads spin, one per core. Other threads would compete with them for the
cores. So our loops run on the same thread team, through the OpenMP runtime that torch loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable

from millrace.kernels.compiled import compiled

Arguments = tuple[Any, ...]

# GNU's entry point, which the runtimes of LLVM and Intel also export.
PARALLEL = "GOMP_parallel"
RUNTIMES = ("libgomp*", "libiomp*", "libomp*")
SYMBOL = "millrace_parallel"
PROCESS = os.getpid()
# More parts than threads: if one thread is delayed, the others take its remaining parts.
PARTS_PER_THREAD = 4


@cache
def _parallel() -> Any:
    folder = Path(torch.__file__).parent / "lib"
    shipped = [str(path) for name in RUNTIMES for path in sorted(folder.glob(name))]
    # None is the process itself, for a torch that loaded the system's runtime instead of its own.
    for path in (None, *shipped):
        offered = getattr(ctypes.CDLL(path), PARALLEL, None)
        if offered is not None:
            return offered
    return None


def num_threads() -> int:
    """Return the size of the thread team for `share_out`, as set by `torch.set_num_threads`."""
    # A forked child process has none of its parent's threads, and the runtime would wait for them.
    known = _parallel() is not None and os.getpid() == PROCESS
    return torch.get_num_threads() if known else 1


def cuts(most: int) -> tuple[int, int]:
    """Return the number of parts to divide work into, at most `most`, and the number of threads."""
    return cut(most, num_threads())


@compiled()
def cut(most: int, num_threads: int) -> tuple[int, int]:
    """Return `cuts` for a given number of threads."""
    num_parts = max(1, min(PARTS_PER_THREAD * num_threads, most))
    return num_parts, min(num_threads, num_parts)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _alone(member: int, shared: int, num_members: int, flags: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(member)(shared)


# Machine code cached on disk refers to the symbol, so it must be defined before any is loaded.
binding.add_symbol(SYMBOL, ctypes.cast(_parallel() or _alone, ctypes.c_void_p).value)


@compiled()
def bounds(total: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the begin and end of a part of `total` items; the sizes of parts differ by at most one."""
    return total * part // num_parts, total * (part + 1) // num_parts


def share_out(function: Callable[..., None], arguments: Arguments, num_parts: int, num_members: int) -> None:
    """Call `function(*arguments, part)` for every part from 0 on; an idle thread takes the next part.

    Exceptions of the compiled function are lost. The team has at most `num_threads()` members.
    """
    for part in range(num_parts):
        function(*arguments, part)


# Not an overload, which would be compiled once more around the same machine code.
@type_callable(share_out)
def _typed(typing: Any) -> Callable[..., Any]:
    def compiles(function: Any, arguments: Any, num_parts: Any, num_members: Any) -> Any:
        function.get_call_type(typing, (*arguments.types, types.intp), {})
        return types.void

    return compiles


@lower_builtin(share_out, types.Dispatcher, types.BaseTuple, types.Integer, types.Integer)
def _shared_out(target: Any, builder: Any, signature: Any, values: Any) -> Any:
    function, arguments = signature.args[:2]
    compiled = function.dispatcher.overloads[(*arguments.types, types.intp)]
    target.active_code_library.add_linking_library(compiled.library)
    number, pointer = target.get_value_type(types.intp), ir.IntType(8).as_pointer()
    given = [builder.extract_value(values[1], i) for i in range(len(arguments.types))]
    # State shared by the threads: the next part, the number of parts, the arguments.
    shared_type = ir.LiteralStructType([number, number, *(value.type for value in given)])
    shared = cgutils.alloca_once(builder, shared_type)
    for i, value in enumerate((ir.Constant(number, 0), values[2], *given)):
        builder.store(value, cgutils.gep_inbounds(builder, shared, 0, i))
    name = f"{compiled.fndesc.mangled_name}.share"
    member = builder.module.globals.get(name)
    if member is None:
        member = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [pointer]), name)
        member.linkage = "internal"
        _member(target, member, shared_type.as_pointer(), compiled)
    data = builder.bitcast(shared, pointer)
    with builder.if_else(builder.icmp_signed("<", values[3], ir.Constant(number, 2))) as (one, many):
        with one:
            builder.call(member, [data])
        with many:
            count = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [member.type, pointer, count, count])
            parallel = cgutils.get_or_insert_function(builder.module, kind, SYMBOL)
            members = builder.trunc(values[3], count)
            builder.call(parallel, [member, data, members, ir.Constant(count, 0)])
    return target.get_dummy_value()


def _member(target: Any, member: Any, shared_type: Any, compiled: Any) -> None:
    builder = ir.IRBuilder(member.append_basic_block("entry"))
    shared = builder.bitcast(member.args[0], shared_type)
    next_part = cgutils.gep_inbounds(builder, shared, 0, 0)
    num_parts = builder.load(cgutils.gep_inbounds(builder, shared, 0, 1))
    kinds = compiled.signature.args[:-1]
    given = [builder.load(cgutils.gep_inbounds(builder, shared, 0, 2 + i)) for i in range(len(kinds))]
    function = target.declare_function(builder.module, compiled.fndesc)
    loop, body, end = (member.append_basic_block(name) for name in ("next", "part", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    part = builder.atomic_rmw("add", next_part, ir.Constant(num_parts.type, 1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, num_parts), body, end)
    builder.position_at_end(body)
    # Stack space for the call is allocated once, in the entry block.
    target.call_conv.call_function(
        builder, function, compiled.signature.return_type, compiled.signature.args, (*given, part)
    )
    builder.branch(loop)
    builder.position_at_end(end)
    builder.ret_void()
