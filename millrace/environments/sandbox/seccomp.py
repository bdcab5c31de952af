"""A seccomp filter: system calls that a program in a sandbox does not need and the kernel refuses it.

Most are refused to a process without capabilities anyway, but through code in which errors were found.
Shared memory of System V and anonymous files are refused because no limit counts them.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping

# Numbers on x86_64 and aarch64; one where they are equal.
_REFUSED: dict[str, tuple[int, int] | int] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": 431,
    "fsmount": 432,
    "fsopen": 430,
    "fspick": 433,
    "init_module": (175, 105),
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "io_uring_setup": 425,
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": 447,
    "mount": (165, 40),
    "mount_setattr": 442,
    "move_mount": 429,
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": 428,
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": 438,
    "pivot_root": (155, 41),
    "process_madvise": 440,
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": 443,
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), 435, (41, 198)
# The flags CLONE_NEW* of clone(2): a new namespace of any kind.
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# On x86_64 this bit selects another table of system calls (x32).
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def supported(machine: str = "") -> bool:
    """Return whether the numbers of this processor's system calls are known."""
    return (machine or platform.machine()) in _ARCHITECTURES


def refuse_system_calls() -> None:
    """Apply the filter to this process and all that it starts; it cannot be removed.

    Raises:
        OSError: the kernel has no seccomp.
    """
    machine = platform.machine()
    code = filter_code(machine)
    program = _Program(len(code) // 8, code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    if prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), zero, zero
    ):
        raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")


def filter_code(machine: str) -> bytes:
    """Assemble the filter for a processor (classic BPF, 8 bytes an instruction)."""
    place = list(_ARCHITECTURES).index(machine)
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _ERROR | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _ERROR | errno.ENOSYS),
        _instruction(_EQUAL, _CLONE3, 0, 1),  # its flags are in memory; the C library then takes clone
        _instruction(_RETURN, _ERROR | errno.ENOSYS),
    ]
    for number in refused_numbers(machine).values():
        code += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _ERROR | errno.EPERM)]
    code += [
        _instruction(_EQUAL, _CLONE[place], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _SOCKET[place], 0, 2 + len(_FAMILIES)),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
    ]
    for left, family in zip(reversed(range(len(_FAMILIES))), _FAMILIES.values(), strict=True):
        code.append(_instruction(_EQUAL, family, left + 1, 0))
    code += [_instruction(_RETURN, _ERROR | errno.EAFNOSUPPORT), _instruction(_RETURN, _ALLOW)]
    return b"".join(code)


def refused_numbers(machine: str) -> Mapping[str, int]:
    """Return the refused system calls of a processor by name."""
    place = list(_ARCHITECTURES).index(machine)
    return {name: one if isinstance(one, int) else one[place] for name, one in _REFUSED.items()}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
