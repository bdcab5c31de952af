"""Programs in a sandbox: what they see, how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.environments.sandbox import server_sandbox
from millrace.environments.sandbox.execution import RunLimits, SandboxError
from millrace.environments.sandbox.server_sandbox import ServerSandbox, bubblewrap_program, plain_program
from tests.house.source import ROOT

KINDS = pytest.mark.parametrize("kind", ["bubblewrap", "none"])
WITH_WASM = pytest.mark.parametrize("kind", ["bubblewrap", "none", "wasm"])
# Far beyond what a test takes; only a hang reaches it.
LONG_S = 100.0
LIMITS = RunLimits(wall_s=LONG_S, cpu_s=LONG_S)
# Prints the process id of a daemon that it leaves behind.
DAEMON = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        time.sleep(1000)
    os._exit(0)
print(os.read(read, 20).decode())
"""
COUNT = "import os; print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))"


@pytest.mark.world
@KINDS
def test_python_code_ends_as_a_script_does(opened, kind):
    sandbox = opened(kind, LIMITS)
    done = sandbox.run("import sys\nprint(sys.stdin.read()[::-1], __name__)\nraise SystemExit(3)", "abcé")
    assert (done.stdout, done.stderr, done.exit_code) == ("écba __main__\n", "", 3)
    assert (done.ended, done.note) == ("exit", "") and done.seconds > 0
    text = "import atexit, threading\natexit.register(print, 'second')\n"
    text += "threading.Timer(0.01, print, ['first']).start()"
    assert sandbox.run(text).stdout == "first\nsecond\n"
    sandbox.run("import sys\nfile = open('left open', 'w')\nfile.write('text')\nsys.stdout.close()")
    assert sandbox.read("left open") == b"text"
    message = sandbox.run("import sys\nsys.exit('what is wrong')")
    assert (message.stderr, message.exit_code) == ("what is wrong\n", 1)


@pytest.mark.world
@WITH_WASM
def test_a_traceback_begins_at_the_program(opened, kind):
    done = opened(kind, LIMITS).run("def half(x):\n    return x / 0\n\nhalf(1)")
    lines = done.stderr.splitlines()
    assert done.exit_code == 1
    assert [line for line in lines if "File" in line] == lines[1:5:2] and "main.py" in lines[1]
    assert (lines[0], lines[-1]) == (
        "Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
    )
    assert opened(kind, LIMITS).run("x = (").stderr.endswith("SyntaxError: '(' was never closed\n")


@pytest.mark.world
@KINDS
def test_command_lines_and_signals(opened, kind):
    sandbox = opened(kind, LIMITS)
    done = sandbox.run(["sh", "-c", "cat; echo wrong >&2; exit 5"], "text")
    assert (done.stdout, done.stderr, done.exit_code) == ("text", "wrong\n", 5)
    missing = sandbox.run(["no-such-program"])
    assert (missing.exit_code, missing.stderr) == (127, "no-such-program: No such file or directory\n")
    assert sandbox.run(["echo", "a\0b"]).stderr == "echo: embedded null byte\n"
    assert "surrogates not allowed" in sandbox.run(["\ud800"]).stderr
    assert sandbox.run(["od", "-An", "-tx1"], "\ud800").stdout.split() == ["ed", "a0", "80"]
    assert sandbox.run(["sh", "-c", "kill -9 $$"]).exit_code == -signal.SIGKILL
    with pytest.raises(ValueError, match="no program to run"):
        sandbox.run([])


@pytest.mark.world
@WITH_WASM
def test_files_stay_until_they_are_cleared(opened, kind):
    sandbox = opened(kind, LIMITS)
    sandbox.write("folder/data.bin", b"\x00\xff")
    sandbox.write("tool.py", b"value = 7")
    stdin = "0" if kind == "wasm" else "'/dev/stdin'"
    done = sandbox.run(
        f"import tool; open('new', 'w').write(str(tool.value))\nprint(len(open({stdin}).read()))"
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert (sandbox.read("new"), sandbox.read("folder/data.bin")) == (b"7", b"\x00\xff")
    with pytest.raises(SandboxError, match=r"^none cannot be read: FileNotFoundError: .*'none'$"):
        sandbox.read("none")
    sandbox.clear()
    assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n"
    if kind != "wasm":
        assert sandbox.run(["ls", "-A", ".."]).stdout.split() == ["work"]


@pytest.mark.world
def test_what_cannot_be_cleared_is_left_with_its_server(opened):
    sandbox = opened(limits=LIMITS)
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    assert sandbox.run(deep).exit_code == 0
    sandbox.clear()
    assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n"


@pytest.mark.world
def test_a_program_in_bubblewrap_sees_nothing_of_the_host(opened):
    sandbox = opened(limits=LIMITS)
    seen = sandbox.run(
        "import os; print(sorted(os.environ), os.listdir('/home') if os.path.exists('/home') else '')"
    )
    assert seen.stdout == "['HOME', 'LANG', 'PATH', 'TMPDIR'] \n"
    outside = sandbox.run(f"print(open({__file__!r}).read())")
    assert "FileNotFoundError" in outside.stderr
    assert sandbox.run(COUNT).stdout.startswith("[1, ")


@pytest.mark.world
@pytest.mark.parametrize("kind", ["bubblewrap", "wasm"])
@pytest.mark.parametrize(
    ("code", "changed", "ended", "note"),
    [
        ("import time; time.sleep(1000)", {"wall_s": 0.2}, "timeout", "stopped after 0.2 s"),
        ("while True: pass", {"cpu_s": 1.0}, "cpu", "stopped after 1 s of processor time"),
        (
            "import signal\nif hasattr(signal, 'SIGXCPU'): signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
            "while True: pass",
            {"cpu_s": 1.0},
            "cpu",
            "stopped after 1 s of processor time",
        ),
        (
            "bytearray(300 << 20)",
            {"memory_bytes": 200 << 20},
            "memory",
            "needed more than 209,715,200 bytes of memory",
        ),
        (
            "print('x' * 5000)",
            {"output_bytes": 4096},
            "output",
            "printed more than 4,096 bytes; the rest is cut off",
        ),
    ],
)
def test_each_limit_says_what_it_was(opened, kind, code, changed, ended, note):
    done = opened(kind, LIMITS).run(code, limits=replace(LIMITS, **changed))
    assert (done.ended, done.note) == (ended, note)
    assert len(done.stdout) == (4096 if ended == "output" else 0)


@pytest.mark.world
def test_processes_threads_and_files_are_counted(opened):
    sandbox = opened(limits=replace(LIMITS, num_processes=8))
    threads = "import threading\nthreading.stack_size(32768)\nwait = threading.Event()\n"
    threads += "while True: threading.Thread(target=wait.wait).start()"
    for code in ("import os\nwhile True: os.fork()", threads):
        done = sandbox.run(code)
        # The kernel refuses the ninth where it counts them, that is, to all but root.
        assert (
            done.ended == "processes" or "BlockingIOError" in done.stderr or "start new thread" in done.stderr
        )
    assert sandbox.run("import itertools\nfor n in itertools.count(): open(str(n), 'w')").ended == "files"
    assert sandbox.run("print('goes on')").stdout == "goes on\n"


@pytest.mark.world
@KINDS
def test_nothing_outlives_a_run(opened, kind):
    sandbox = opened(kind, LIMITS)
    pid = int(sandbox.run(DAEMON).stdout)
    assert str(pid) not in sandbox.run(COUNT).stdout.strip("[]\n").split(", ")


@pytest.mark.world
@WITH_WASM
def test_closing_ends_a_run_of_another_thread(opened, kind):
    sandbox = opened(kind, LIMITS)
    found: list[str] = []

    def run() -> None:
        try:
            sandbox.run("import time; time.sleep(1000)")
        except SandboxError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    sandbox.close()
    thread.join(LONG_S)
    assert len(found) == 1 and "the sandbox " in found[0]
    for call in (lambda: sandbox.run("print()"), sandbox.clear):
        with pytest.raises(SandboxError, match="was closed; open another"):
            call()


@pytest.mark.world
def test_a_server_that_is_killed_is_an_error_and_can_start_anew(opened):
    sandbox = opened("none", LIMITS)
    with pytest.raises(SandboxError, match="has ended, with its files: its process was killed by signal 9"):
        sandbox.run("import os; os.kill(os.getppid(), 9)")
    with pytest.raises(SandboxError, match="clear starts it anew"):
        sandbox.run("print()")
    sandbox.clear()
    assert sandbox.run("print('again')").stdout == "again\n"


@pytest.mark.world
@KINDS
def test_it_ends_with_its_parent(opened, kind):
    opened(kind, LIMITS).close()  # skips where there is no bubblewrap
    text = (
        "import sys, threading\n"
        "from millrace.environments.sandbox.open_sandbox import open_sandbox\n"
        f"sandbox = open_sandbox({kind!r})\n"
        "threading.Thread(target=sandbox.run, args=('import time; time.sleep(1000)',), daemon=True).start()\n"
        "print(sandbox._supervisor.children[0]._popen.pid, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, text=True
    ) as parent:
        assert parent.stdout is not None
        keeper = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    # Readable once the keeper has ended, which is after all that it kept.
    assert select.select([keeper], [], [], LONG_S)[0] == [keeper]
    os.close(keeper)


def test_without_bubblewrap_or_on_another_processor_it_refuses(monkeypatch):
    monkeypatch.setattr(server_sandbox, "find_bubblewrap", lambda: None)
    with pytest.raises(SandboxError, match=r"^programs cannot be isolated here: install bubblewrap \(apt "):
        ServerSandbox(bubblewrap_program, RunLimits())
    monkeypatch.setattr(server_sandbox, "find_bubblewrap", lambda: "/bin/bwrap")
    monkeypatch.setattr(server_sandbox.seccomp, "supported", lambda: False)
    with pytest.raises(SandboxError, match="x86_64 and aarch64 only"):
        ServerSandbox(bubblewrap_program, RunLimits())


@pytest.mark.world
def test_a_sandbox_that_does_not_start_says_why(monkeypatch):
    def without_namespace(limits: RunLimits):
        program = plain_program(limits)
        return replace(program, settings={**program.settings, "confined": True})

    with pytest.raises(SandboxError, match="did not start: the sandbox has no process namespace of its own$"):
        ServerSandbox(without_namespace, RunLimits())


def test_the_mounts_show_the_system_and_no_home(monkeypatch):
    monkeypatch.setattr(server_sandbox, "find_bubblewrap", lambda: "bwrap")
    monkeypatch.setattr(server_sandbox, "without_user_namespaces", lambda path: ("--disable-userns",))
    program = bubblewrap_program(RunLimits(folder_bytes=12345))
    assert program.confine is not None
    words = program.confine(["python", "worker.py"])
    assert words[-1] == "/run/millrace/millrace/processes/worker.py" and "--disable-userns" in words
    shown = [words[place + 1] for place, word in enumerate(words) if word.startswith("--ro-bind")]
    package = str(Path(server_sandbox.__file__).parents[2])
    assert [
        path for path in shown if not path.startswith(("/usr", "/lib", "/bin", "/sbin", "/etc", package))
    ] in (
        [sys.base_prefix],
        [],
    )
    # Every folder that can be written has a size, and everything else is read-only in the end.
    assert [words[place - 1] for place, word in enumerate(words) if word == "--tmpfs"] == ["12345"] * 2
    assert words[-9:-7] == ["--remount-ro", "/"]
    assert "PATH" in program.environment and "PYTHONPATH" not in program.environment
