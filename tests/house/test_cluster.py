"""`make cluster`: when it is skipped, what it compares, and its hosts where namespaces are allowed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.event_logs import write_events
from tests.house.scripts import load_script
from tests.house.source import ROOT

cluster, hosts = load_script("cluster"), load_script("hosts")
# Run in namespaces: two hosts, and a message from one to the other before, during and after lost packets.
PARTS = """
import json, subprocess, sys
from pathlib import Path
from hosts import hosts, network

ASK = "import socket; s = socket.create_connection(('10.77.0.2', 9), 3); print(s.recv(9).decode())"
SERVE = "import socket\\nl = socket.create_server(('10.77.0.2', 9))\\nprint('up', flush=True)\\n"
SERVE += "while True: l.accept()[0].sendall(b'reply')"

def said(host, *words):
    done = subprocess.run(host.command(words), capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "none"

found = {}
with network():
    shared = Path("/tmp/shared-by-all")
    shared.mkdir()
    with hosts(2, shared, {"NAMED": "by all"}) as (first, second):
        found["names"] = [said(host, "hostname") for host in (first, second)]
        found["variables"] = said(first, "sh", "-c", "echo $NAMED $HOME")
        said(first, "sh", "-c", "echo 1 > /tmp/own; echo 2 > /tmp/shared/ours; echo 3 > /dev/shm/memory")
        found["seen"] = said(second, "sh", "-c", "ls /tmp/own /dev/shm/memory /tmp/shared/ours; true")
        server = subprocess.Popen(second.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE)
        server.stdout.readline()
        ask = [sys.executable, "-c", ASK]
        found["answers"] = [said(first, *ask)]
        second.mute()
        found["answers"].append(said(first, *ask))
        second.mute(lost=False)
        found["answers"].append(said(first, *ask))
        second.vanish()
        found["answers"].append(said(first, *ask))
        found["server"] = server.wait(60)
print(json.dumps(found))
"""


@pytest.fixture
def lab(tmp_path: Path):
    return cluster.Lab([], tmp_path, tmp_path)


def write_records(lab, name: str, *records: dict[str, object]) -> None:
    lab.run(name).mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (lab.run(name) / "metrics.jsonl").write_text(lines, encoding="utf-8")


def test_without_the_programs_it_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nsenter" else name)
    monkeypatch.setattr(sys, "argv", ["cluster.py", "torchrun"])
    assert cluster.main() == 77
    assert capsys.readouterr().out == "skipped: nsenter not found; install util-linux, iproute2 and procps\n"


def test_a_case_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster.py", "slurm"])
    with pytest.raises(SystemExit) as ended:
        cluster.main()
    assert ended.value.code == 2
    assert "no case slurm; there are torchrun, ray" in capsys.readouterr().err


def test_records_are_compared_but_for_times(lab) -> None:
    first = {"step": 0, "stage": "reinforcement", "policy/grad_norm": 0.0}
    second = {**first, "step": 1, "policy/grad_norm": 0.5}
    write_records(lab, "alone", {**first, "time/step_s": 2.0}, second)
    write_records(lab, "equal", {**first, "time/step_s": 3.0}, second)
    write_records(lab, "other", first, {**second, "policy/grad_norm": 0.6})
    write_records(lab, "short", first)
    assert cluster.same(lab, "equal") == 2
    with pytest.raises(
        cluster.Failed, match="^other: policy/grad_norm of step 1 differ from those of one host$"
    ):
        cluster.same(lab, "other")
    with pytest.raises(cluster.Failed, match="^short has 1 records, and one host has 2$"):
        cluster.same(lab, "short")


def test_equal_records_without_a_gradient_show_nothing(lab) -> None:
    for name in ("alone", "equal"):
        write_records(lab, name, {"step": 0, "stage": "reinforcement", "policy/grad_norm": 0.0})
    with pytest.raises(cluster.Failed, match="^no batch has a gradient, so that equal records show nothing$"):
        cluster.same(lab, "equal")


def test_an_update_lasts_until_the_engine_has_loaded_it(tmp_path: Path) -> None:
    times = {1.0: "loaded", 2.0: "update", 5.5: "loaded", 7.0: "update", 7.5: "loaded"}
    kinds = {"loaded": "weights_loaded", "update": "update_weights"}
    fields = {"loaded": {"engine": "engine-0", "step": 0}, "update": {"policy_version": 1}}
    events = [{"kind": kinds[kind], "time_s": time_s, **fields[kind]} for time_s, kind in times.items()]
    write_events(tmp_path / "events.log", events)
    assert cluster.update_seconds(tmp_path) == [3.5, 0.5]


@pytest.mark.world
@pytest.mark.slow
def test_hosts_have_names_files_and_links_of_their_own() -> None:
    try:
        command = hosts.namespaces()
    except hosts.NoNamespaces as reason:
        pytest.skip(str(reason))
    words = [*command, sys.executable, "-c", PARTS]
    done = subprocess.run(
        words, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"] == ["host1", "host2"]
    assert found["variables"] == "by all /tmp/home"
    assert found["seen"] == "/tmp/shared/ours"
    assert found["answers"] == ["reply", "none", "reply", "none"]
    assert found["server"] != 0
