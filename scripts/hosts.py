"""Hosts made of Linux namespaces on this machine: own addresses, names, processes, /tmp and /dev/shm.

Everything exists inside namespaces of one command (`inside`) and ends with it: bridge, links, mounts, files
and processes, however the command ends. Nothing of the machine itself is changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "bridge", "tc", "ps")
BRIDGE = "hosts"
# The only folder that all hosts have in common, besides the machine's own programs and this checkout.
SHARED = Path("/tmp/shared")
# Bit/s of each host's link.
RATE = 1_000_000_000


class NoNamespaces(Exception):
    """This machine cannot make such hosts; the message has the reason."""


def namespaces() -> list[str]:
    """Return the command that runs another one in namespaces of its own.

    Raises:
        NoNamespaces: this machine does not allow them, or lacks a program.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise NoNamespaces(f"{', '.join(missing)} not found; install util-linux, iproute2 and procps")
    if any(Path(path).resolve().is_relative_to("/tmp") for path in (ROOT, sys.prefix)):
        raise NoNamespaces(f"{ROOT} or its Python is in /tmp, which each host has for itself; move it")
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    # The kernel ends the namespaces with this process, however it ends.
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *NAMESPACES]
    trial = "ip link add trial type bridge && mount -t tmpfs tmpfs /tmp"
    done = subprocess.run([*command, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"namespaces are not allowed here: {' '.join(done.stderr.split())}")
    return command


def inside(words: Sequence[str]) -> int:
    """Run a command in namespaces of its own and return its exit code; NoNamespaces if not allowed."""
    process = subprocess.Popen([*namespaces(), *words])
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill()
        process.wait()


def run(*words: str) -> None:
    """Run a command of this script's own; RuntimeError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Host:
    """A host: a process that is the first one of its namespaces, and whose death ends all others.

    Attributes:
        name: also its hostname, which no host resolves.
        address: on the bridge.
        init: the process that holds the namespaces.
        pid: the first process inside, as seen from here.
    """

    name: str
    address: str
    init: subprocess.Popen[bytes]
    pid: int
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
        """Return the command line that runs a command in this host, in the shared folder."""
        given = {**self.variables, **(variables or {})}
        named = [f"{name}={value}" for name, value in given.items()]
        return ["nsenter", "-t", str(self.pid), "-a", "env", "-C", str(SHARED), *named, *words]

    def start(self, words: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in this host, whose output goes to a file of this script."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(words, variables), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def end_all(self) -> None:
        """Kill all processes in this host but its first."""
        everything = "kill -9 -1"
        subprocess.run(self.command(["sh", "-c", everything]), capture_output=True, check=False)

    def mute(self, *, lost: bool = True) -> None:
        """Lose every packet from and to this host, or no longer; its link stays up."""
        run("bridge", "link", "set", "dev", self.name, "state", "0" if lost else "3")

    def limit(self, rate: int) -> None:
        """Set the rate of the link in bit/s, both ways."""
        shaped = ["tbf", "rate", f"{rate}bit", "burst", str(max(rate // 800, 64_000)), "latency", "100ms"]
        run(*self.command(["tc", "qdisc", "replace", "dev", "eth0", "root", *shaped]))
        run("tc", "qdisc", "replace", "dev", self.name, "root", *shaped)

    def vanish(self) -> None:
        """Delete the link, then kill everything: no other host gets a last packet."""
        run("ip", "link", "delete", self.name)
        self.close()

    def close(self) -> None:
        """End all processes of this host."""
        self.init.kill()
        self.init.wait()

    def processes(self) -> list[str]:
        """Return the command lines of what runs in this host."""
        done = subprocess.run(
            self.command(["ps", "-eo", "args="]), capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()


@contextmanager
def network() -> Iterator[None]:
    """Make an empty /tmp and the bridge of the hosts, in a process that `inside` has started."""
    run("mount", "-t", "tmpfs", "tmpfs", "/tmp")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    yield


def start_host(number: int, shared: Path, variables: Mapping[str, str]) -> Host:
    """Start a host on the bridge: a shared folder, and a /tmp, /dev/shm and HOME of its own.

    Raises:
        RuntimeError: it did not start in time.
    """
    name, address = f"host{number}", f"10.77.0.{number}"
    own = Path(f"/tmp/{name}-{time.monotonic_ns()}")
    (own / "shared").mkdir(parents=True)
    (own / "home").mkdir()
    setup = (
        f"hostname {name} && mount --bind {shared} {own}/shared && mount --rbind {own} /tmp && "
        "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready && trap '' CHLD && "
        "exec sleep infinity"
    )
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--uts", "--ipc", "sh", "-c", setup]
    init = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert init.stdout is not None
    if init.stdout.readline() != b"ready\n":
        init.kill()
        raise RuntimeError(f"{name} did not start")
    (child,) = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    host = Host(name, address, init, int(child), {"HOME": "/tmp/home", **variables})
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", child)
    run("ip", "link", "set", name, "master", BRIDGE, "up")
    run(*host.command(["ip", "address", "add", f"{address}/24", "dev", "eth0"]))
    run(*host.command(["ip", "link", "set", "eth0", "up"]))
    run(*host.command(["ip", "route", "add", "default", "dev", "eth0"]))
    return host


@contextmanager
def hosts(count: int, shared: Path, variables: Mapping[str, str]) -> Iterator[list[Host]]:
    """Start so many hosts for a block."""
    found: list[Host] = []
    try:
        for number in range(1, count + 1):
            found.append(start_host(number, shared, variables))
        for host in found:
            host.limit(RATE)
        yield found
    finally:
        for host in found:
            host.close()


def wait_for(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a process; None where it has not ended in time."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def interrupted(number: int, frame: object) -> None:
    """Handle SIGTERM as Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)
