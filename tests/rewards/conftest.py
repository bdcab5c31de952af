"""A folder with a user's reward function, and rewards that are closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.rewards import isolated
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.sandbox import FUNCTION_PERMISSIONS
from tests.rewards.helpers import LIMIT_S, Often

FUNCTIONS = '''
import glob, os, re, socket, subprocess, sys, tempfile, time

def write(name, number):
    """Write a whole file at once."""
    with open(name + ".new", "w") as file:
        file.write(str(number))
    os.replace(name + ".new", name)

def grade(prompt, completion, answer, row):
    """Does what the completion says, and keeps a record of every call."""
    with open("calls.txt", "a") as record:
        record.write(completion + "\\n")
    word, _, rest = completion.partition(" ")
    if word == "value":
        return float(rest)
    if word == "sleep":
        time.sleep(float(rest))
        return 1.0
    if word == "meet":  # until so many judges are at work
        write(f"met-{os.getpid()}", "")
        while len(glob.glob("met-*[0-9]")) < int(rest):
            time.sleep(0.01)
        return os.getpid()
    if word == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        write("child.pid", child.pid)
    if word in ("hang", "child", "loop", "regex"):
        write("hangs", os.getpid())
    if word in ("hang", "child"):
        time.sleep(600)
    if word == "loop":
        while True:
            pass
    if word == "regex":  # stays inside C, where no other thread of the judge runs
        re.fullmatch("(a+)+b", "a" * 40)
    if word == "raise":
        raise KeyError(rest)
    if word == "forge":  # a verdict, into everything that is open
        line = b'["score",1.0,""]\\n' if rest != "endless" else b"x" * (1 << 17)
        for number in range(3, 30):
            try:
                os.write(number, line)
            except OSError:
                pass
        return 0.0
    if word == "daemon":
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        write("child.pid", subprocess.Popen(command, start_new_session=True).pid)
        return 1.0
    if word == "allocate":
        return float(len(bytearray(int(rest) << 20)))
    if word == "write":
        open(rest, "w").close()
        return 1.0
    if word == "connect":
        socket.create_connection(("127.0.0.1", int(rest)), 5).close()
        return 1.0
    if word == "temporary":
        with tempfile.TemporaryDirectory() as folder:
            open(folder + "/file", "w").close()
            os.rename(folder + "/file", folder + "/other")
        return 1.0
    if word == "error":
        raise ValueError(rest)
    if word == "leave":
        sys.exit(rest)
    if word == "die":
        print("last words", file=sys.stderr)
        os._exit(int(rest))
    if word == "kill":
        os.kill(os.getpid(), 9)
    if word == "print":
        print(rest)
        os.write(1, b"[raw]")
        subprocess.run([sys.executable, "-c", "print('from a child')"])
        return 1.0
    if word == "input":
        return float(len(sys.stdin.read()))
    if word == "text":
        return rest
    if word == "pid":
        return os.getpid()
    if word == "fields":
        return float([prompt, answer, row] == ["the prompt", "the answer", {"pair": (1, 2), "of": {3: "x"}}])
    if word == "environment":
        return float(rest in os.environ)
    return None
'''


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IsolatedReward]]:
    """Make rewards that are closed afterwards; the default judges with the functions above.

    Without bubblewrap, which not every machine has; `test_sandbox.py` is about that.
    """
    monkeypatch.setattr(isolated, "find_bubblewrap", lambda: None)
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    made: list[IsolatedReward] = []

    def reward(spec: dict[str, Any] | None = None, **options: Any) -> IsolatedReward:
        spec = spec or {"kind": "function", "function": "my_rewards:grade"}
        allowed = replace(FUNCTION_PERMISSIONS, writable=(str(tmp_path),))
        default = {"timeout_s": LIMIT_S, "num_workers": 1}
        if spec["kind"] == "function":
            default["permissions"] = allowed
        made.append(IsolatedReward(spec, **(default | options)))
        if "clock" in options:
            made[-1]._workers._make_poll = Often
        return made[-1]

    yield reward
    for one in made:
        one.close()
