"""A reward worker inside bubblewrap: what it sees, and that everything of it ends."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.processes.bubblewrap import find_bubblewrap
from millrace.rewards import isolated, sandbox
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.sandbox import FUNCTION_PERMISSIONS, Permissions, sandboxed
from tests.rewards.helpers import prompts, score

PROGRAMS = '''
import os, subprocess, sys

def run(prompt, completion, answer, row):
    """1 where a program of its own succeeds, as code does that a model wrote."""
    done = subprocess.run([sys.executable, "-c", completion], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout or 1)

def grade(prompt, completion, answer, row):
    return float(os.getpid())
'''

FORGE = """
import os
found = 0
for name in range(64):
    try:
        os.write(os.open(f"/proc/{os.getppid()}/fd/{name}", os.O_WRONLY), b'["score",1.0,""]\\n')
        found += name > 2
    except OSError:
        pass
print(found)
"""


@pytest.fixture
def caged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make rewards whose function runs programs inside bubblewrap."""
    found = find_bubblewrap()
    if found is None:
        pytest.skip("bubblewrap is not installed, or this system does not let it work")
    (tmp_path / "programs.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isolated, "find_bubblewrap", lambda: found)
    made: list[IsolatedReward] = []

    def make(name: str = "run", **options: object) -> IsolatedReward:
        spec = {"kind": "function", "function": f"programs:{name}"}
        made.append(IsolatedReward(spec, **({"timeout_s": 60.0, "num_workers": 1} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.world
def test_a_program_sees_files_read_only_and_no_process_and_no_network(caged, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcomes = score(
            caged(),
            f"open({str(tmp_path / 'new')!r}, 'w')",
            f"import os; os.remove({str(tmp_path / 'programs.py')!r})",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
            f"import os; os.kill({os.getpid()}, 0)",
            "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))",
            "import os; print(len(os.listdir('/run')))",
            f"print(len(open({str(tmp_path / 'programs.py')!r}).read()))",
            "import tempfile; tempfile.TemporaryFile().write(b'x')",
            "print(open('/proc/self/status').read().split('CapEff:')[1].split()[0].count('0'))",
            # Root without capabilities owns it: the kernel runs a program that is named there as root.
            "open('/proc/sys/kernel/core_pattern', 'r+')",
        )
    reasons = [outcome.reason.partition(" (programs.py")[0] for outcome in outcomes]
    assert "Read-only file system" in reasons[0] and "Read-only file system" in reasons[1]
    assert "ConnectionRefusedError" in reasons[2] and "ProcessLookupError" in reasons[3]
    assert reasons[4:9] == [""] * 5 and "core_pattern" in reasons[9]
    # bubblewrap, its monitor, the worker, and the program.
    assert [outcome.value for outcome in outcomes[4:9]] == [3.0, 0.0, float(len(PROGRAMS)), 1.0, 16.0]


@pytest.mark.world
def test_what_is_permitted_is_done(caged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    allowed = replace(FUNCTION_PERMISSIONS, network=True, writable=(str(folder),))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        write = f"open({str(folder / 'new')!r}, 'w').write('text')"
        outcomes = score(caged(permissions=allowed), connect, write)
    assert [(outcome.value, outcome.reason) for outcome in outcomes] == [(1.0, "")] * 2
    assert (folder / "new").read_text() == "text"


@pytest.mark.world
def test_a_program_cannot_write_a_verdict_of_the_worker(caged):
    """It looks for every pipe of its parent."""
    assert [outcome.value for outcome in score(caged(), FORGE)] == [0.0]


@pytest.mark.world
def test_a_worker_that_is_killed_is_named_by_its_signal(caged):
    reward = caged("grade")
    assert score(reward, "")[0].value > 1
    (outcome,) = score(caged(), "import os; os.kill(os.getppid(), 9)")
    assert outcome.reason == "its process was killed by signal 9 (SIGKILL)"


@pytest.mark.world
def test_built_in_rewards_run_in_it(caged):
    reward = IsolatedReward({"kind": "number"}, timeout_s=60)
    try:
        values = [outcome.value for outcome in reward.score(prompts(2), ["4", "5"])]
    finally:
        reward.close()
    # The answer of these prompts holds no number.
    assert len(values) == 2 and all(value != value for value in values)


def test_the_command_line_names_what_is_permitted(monkeypatch):
    monkeypatch.setattr(sandbox.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    closed = sandboxed("bwrap", ["true"], Permissions())
    assert closed[:2] == ["bwrap", "--unshare-all"] and closed[-2:] == ["--", "true"]
    assert "--share-net" not in closed and "--bind" not in closed
    assert closed[closed.index("--dev-bind-try") + 1] == "/dev/nvidia0"
    opened = sandboxed("bwrap", ["true"], Permissions(network=True, writable=("/a", "/b")))
    assert "--share-net" in opened
    binds = [opened[place + 1 : place + 3] for place, word in enumerate(opened) if word == "--bind"]
    assert binds == [["/a", "/a"], ["/b", "/b"]]
