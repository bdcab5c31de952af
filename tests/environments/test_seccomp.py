"""The seccomp filter: what its instructions answer, and that the kernel applies it."""

from __future__ import annotations

import errno
import struct

import pytest

from millrace.environments.sandbox import seccomp

ALLOWED = 0
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = pytest.mark.parametrize("machine", list(ARCHITECTURE))
CLONE, SOCKET, READ = (
    {"x86_64": 56, "aarch64": 220},
    {"x86_64": 41, "aarch64": 198},
    {"x86_64": 0, "aarch64": 63},
)


def answer(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """The errno of a system call, by an interpreter of the filter's instructions."""
    call = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURE[machine], 0, argument, *[0] * 5)
    code = list(struct.iter_unpack("<HBBI", seccomp.filter_code(machine)))
    place = loaded = 0
    while True:
        kind, if_true, if_false, value = code[place]
        place += 1
        if kind == 0x06:
            return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF
        if kind == 0x20:
            loaded = struct.unpack_from("<I", call, value)[0]
        else:
            true = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value != 0}[kind]
            place += if_true if true else if_false


@MACHINES
def test_the_filter_refuses_what_is_named_and_nothing_else(machine):
    refused = seccomp.refused_numbers(machine)
    # Of 500 numbers: those named, and clone3.
    wrong = {number for number in range(500) if answer(machine, number, 1) != ALLOWED}
    assert wrong == {*refused.values(), 435}
    assert {answer(machine, number) for number in refused.values()} == {errno.EPERM}
    assert answer(machine, 435) == errno.ENOSYS
    assert len(set(refused.values())) == len(refused)


@MACHINES
def test_other_tables_of_system_calls_are_refused(machine):
    other = ARCHITECTURE["aarch64" if machine == "x86_64" else "x86_64"]
    assert answer(machine, READ[machine], architecture=other) == errno.ENOSYS
    assert answer(machine, READ[machine] | 0x40000000) == errno.ENOSYS


@MACHINES
def test_processes_and_sockets(machine):
    assert answer(machine, CLONE[machine], 0x01200011) == ALLOWED  # fork
    assert answer(machine, CLONE[machine], 0x3D0F00) == ALLOWED  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, CLONE[machine], flag | 17) == errno.EPERM
    families = {family: answer(machine, SOCKET[machine], family) for family in range(50)}
    assert [family for family, found in families.items() if found == ALLOWED] == [1, 2, 10]
    assert set(families.values()) == {ALLOWED, errno.EAFNOSUPPORT}


@pytest.mark.world
def test_the_kernel_applies_it(opened):
    code = """
import ctypes, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0, 0, 0, 0), ctypes.get_errno(), libc.unshare(0), ctypes.get_errno())
print(socket.socketpair()[0].family)
try:
    socket.socket(socket.AF_NETLINK)
except OSError as error:
    print(error.errno)
"""
    assert opened().run(code).stdout == f"-1 1 -1 1\n1\n{errno.EAFNOSUPPORT}\n"


def test_other_processors_are_not_supported():
    assert [seccomp.supported(name) for name in ("x86_64", "aarch64", "riscv64")] == [True, True, False]
