"""Three hosts on this machine: torchrun, Ray, lost hosts and links, prefill and decode workers; a table.

The hosts are Linux namespaces (scripts/hosts.py) with addresses, names, processes, /tmp, /dev/shm and HOME
of their own. They share a folder for data and runs, and the checkout. It needs root, or a system that allows
user namespaces.

    python scripts/cluster.py                   # all cases
    python scripts/cluster.py torchrun ray      # some of them

Exit code 0: all cases hold. 1: one does not. 77: this machine does not allow namespaces; nothing was run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from subprocess import run as run_words
from typing import Any

from hosts import (
    RATE,
    ROOT,
    SHARED,
    Host,
    NoNamespaces,
    hosts,
    inside,
    interrupted,
    network,
    start_host,
    wait_for,
)
from killed_run import until
from router import small_model

from millrace.eventlog.log import check_log, read_events
from millrace.observability.files import read_json_lines

NUM_HOSTS = 3
SKIPPED = 77
PORT = "29500"
RAY_PORT = "6379"
# Timeouts: of a whole run (a minute on a quiet machine), of its end after a loss, and of Ray's start.
RUN_S, END_S = 900.0, 240.0
START_S = 300.0
# A wait for a rank that is lost without a last packet ends after twice this.
PHASE_S = 60
STALL_S = 20.0
# The link of the measurement of weight updates, in bit/s, and the bytes of the plain copy.
LIMIT, COPY_BYTES = 200_000_000, 1 << 25
MILLRACE = [sys.executable, "-m", "millrace.cli.main"]
RAY = [str(Path(sys.executable).parent / "ray")]
WORK = Path("/tmp/work")
SETTINGS = [
    "steps=10",
    "threads=1",
    "device=cpu",
    "loggers=[]",
    "data.task_size=300",
    "data.eval_size=24",
    "sft.steps=4",
    "sft.sequences_per_step=24",
    "sft.stop_accuracy=null",
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=4",
    "rewards=[{kind: function, function: 'scored:length'}]",
    "evaluation.measure=reward/mean",
    "engine.max_num_seqs=64",
    "evaluation.every=5",
    "checkpoint.every=2",
    f"timeouts.phase_s={PHASE_S}",
    f"output={SHARED}/runs",
]
ENGINES = ["mesh.dp_shard=2", "engine.num_engines=1", "rollout.max_staleness=2"]
# A reward that differs within a group, in a file that only the shared folder has.
REWARD = """
def length(prompt, completion, answer, row):
    return len(completion) % 3 / 2
"""
# A model of 42 MB, for one rank and an engine.
MODEL = [
    *("engine.num_engines=1", "rollout.max_staleness=1", "steps=6", "sft.steps=1", "checkpoint.every=100"),
    *("model.shape.hidden_size=512", "model.shape.intermediate_size=1536", "model.shape.num_hidden_layers=4"),
]
# A plain copy: what the receiver prints is seconds from the first to the last byte.
RECEIVE = f"""
import socket, sys, time
listener = socket.create_server((sys.argv[1], {PORT}))
listener.settimeout(60)
received = listener.accept()[0]
memory, count = bytearray(1 << 20), len(received.recv(1))
began_s = time.monotonic()
while count < {COPY_BYTES}:
    got = received.recv_into(memory)
    if not got:
        sys.exit("the sender closed the connection")
    count += got
print(time.monotonic() - began_s)
"""
SEND = f"""
import socket, sys, time
ends_s = time.monotonic() + 60
while True:
    try:
        sending = socket.create_connection((sys.argv[1], {PORT}), timeout=60)
        break
    except ConnectionRefusedError:
        if time.monotonic() > ends_s:
            raise
        time.sleep(0.1)
sending.sendall(bytes({COPY_BYTES}))
"""
# Two samples of a prompt of four blocks, and how many transfers brought all of them.
ASK = """
import json, sys, httpx
url, key = sys.argv[1], {"Authorization": f"Bearer {sys.argv[2]}"}
ask = {"prompt_token_ids": [5 + n % 90 for n in range(70)], "n": 2, "max_tokens": 30, "seed": 3}
reply = httpx.post(f"{url}/generate", json={**ask, "ignore_eos": True}, headers=key, timeout=300)
lines = httpx.get(f"{url}/metrics", headers=key, timeout=60).text.splitlines()
whole = sum(float(one.split()[-1]) for one in lines if one.startswith("millrace:kv_tran") and '"all"' in one)
found = [[one["token_ids"], one["logprobs"]] for one in reply.raise_for_status().json()["completions"]]
print(json.dumps([found, whole]))
"""
WORKER_PORT, SERVER_PORT, ALONE_PORT = "7000", "8000", "8001"


class Failed(Exception):
    """A case does not hold; the message says why."""


@dataclass
class Lab:
    """The hosts, and the folder that they share."""

    hosts: list[Host]
    shared: Path
    logs: Path

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.shared / "runs" / name

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a run without times and memory."""
        measured = ("time/", "memory/")
        return [
            {key: value for key, value in record.items() if not key.startswith(measured)}
            for record in read_json_lines(self.run(name) / "metrics.jsonl")
        ]

    def log(self, name: str) -> Path:
        """Return the file for the output of a command."""
        return self.logs / f"{name}.log"

    def tail(self, name: str) -> str:
        """Return the end of the output of a command, or of one on each host."""
        paths = [self.log(name), *(self.log(f"{name}-{host.name}") for host in self.hosts)]
        texts = [path.read_text(errors="replace")[-3000:] for path in paths if path.exists()]
        return "\n".join(texts)

    def torchrun(self, name: str, words: Sequence[str]) -> list[Popen[bytes]]:
        """Start a command of millrace with torchrun, one rank on each host."""
        first = [f"--master-addr={self.hosts[0].address}", f"--master-port={PORT}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NUM_HOSTS}", *first]
        each = ["--nproc-per-node=1", "-m", "millrace.cli.main", *words]
        return [
            host.start([*launcher, f"--node-rank={rank}", *each], self.log(f"{name}-{host.name}"))
            for rank, host in enumerate(self.hosts)
        ]

    def replace(self, place: int) -> None:
        """Start a new host with the number of one that is lost."""
        old = self.hosts[place]
        self.hosts[place] = start_host(place + 1, self.shared, old.variables)

    def alone(self) -> list[dict[str, Any]]:
        """Return the records of three ranks on one host, started by millrace."""
        if not self.run("alone").exists():
            words = [*MILLRACE, "train", "quickstart", *SETTINGS, "mesh.dp_shard=3", "name=alone"]
            finish(self, "alone", [self.hosts[0].start(words, self.log("alone"))])
        return self.records("alone")


def finish(lab: Lab, name: str, processes: Sequence[Popen[bytes]]) -> None:
    """Wait until commands have ended; Failed if one fails or takes too long."""
    ends_s = time.monotonic() + RUN_S
    for process in processes:
        code = wait_for(process, max(0.0, ends_s - time.monotonic()))
        if code:
            raise Failed(f"{name} ended with exit code {code}\n{lab.tail(name)}")
        if code is None:
            raise Failed(f"{name} did not end within {RUN_S:.0f} s\n{lab.tail(name)}")


def await_file(lab: Lab, name: str, pattern: str, processes: Sequence[Popen[bytes]]) -> None:
    """Wait until a run has written a file; Failed if it ends before, or takes too long."""

    def ready() -> bool:
        return any(lab.run(name).glob(pattern)) or any(one.poll() is not None for one in processes)

    if not until(ready, RUN_S) or not any(lab.run(name).glob(pattern)):
        raise Failed(f"{name} wrote no {pattern}\n{lab.tail(name)}")


def same(lab: Lab, name: str) -> int:
    """Compare the records of a run with those of one host, and return their number; Failed if they differ."""
    ours, theirs = lab.alone(), lab.records(name)
    for ours_one, theirs_one in zip(ours, theirs, strict=False):
        if differing := [key for key in ours_one | theirs_one if ours_one.get(key) != theirs_one.get(key)]:
            step = ours_one.get("step")
            raise Failed(f"{name}: {', '.join(differing[:5])} of step {step} differ from those of one host")
    if len(ours) != len(theirs):
        raise Failed(f"{name} has {len(theirs)} records, and one host has {len(ours)}")
    if not any(record.get("policy/grad_norm") for record in ours if record["stage"] == "reinforcement"):
        raise Failed("no batch has a gradient, so that equal records show nothing")
    return len(ours)


# ---- cases: what each returns is a line of the table; Failed is a failure


def torchrun(lab: Lab) -> str:
    """Three ranks, one on each host: the records are those of one host, bit for bit."""
    words = ["train", "quickstart", *SETTINGS, "mesh.dp_shard=3", "name=torchrun"]
    ranks = lab.torchrun("torchrun", words)
    lab.alone()  # at the same time
    finish(lab, "torchrun", ranks)
    return f"{same(lab, 'torchrun')} records of 3 ranks on 3 hosts equal those of one host bit for bit"


def stall(lab: Lab) -> str:
    """The link of a host loses every packet for a while; the run goes on with the same records."""
    lab.alone()
    words = ["train", "quickstart", *SETTINGS, "mesh.dp_shard=3", "name=stall"]
    ranks = lab.torchrun("stall", words)
    await_file(lab, "stall", "checkpoints/step-*", ranks)
    lab.hosts[1].mute()
    time.sleep(STALL_S)
    lab.hosts[1].mute(lost=False)
    finish(lab, "stall", ranks)
    return f"no packet from or to a host for {STALL_S:.0f} s: {same(lab, 'stall')} records equal"


def lost(lab: Lab, place: int) -> str:
    """A host vanishes; the others end with an error, and a run resumed on a new host has the same records."""
    lab.alone()
    name = f"lost-{place + 1}"
    words = ["train", "quickstart", *SETTINGS, "mesh.dp_shard=3", f"name={name}"]
    ranks = lab.torchrun(name, words)
    await_file(lab, name, "checkpoints/step-*", ranks)
    lab.hosts[place].vanish()
    began_s = time.monotonic()
    others = [rank for at, rank in enumerate(ranks) if at != place]
    codes = [wait_for(rank, max(0.0, began_s + END_S - time.monotonic())) for rank in others]
    took_s = time.monotonic() - began_s
    lab.replace(place)
    if None in codes or 0 in codes:
        raise Failed(f"{name}: exit codes {codes} after {END_S:.0f} s\n{lab.tail(name)}")
    resumed = f"{name}-resumed"
    finish(lab, resumed, lab.torchrun(resumed, ["resume", str(SHARED / "runs" / name)]))
    return f"the others ended after {took_s:.0f} s; resumed on a new host, {same(lab, name)} records equal"


@contextmanager
def ray_cluster(lab: Lab, cores: Sequence[int]) -> Iterator[dict[str, str]]:
    """Start a Ray cluster with a token over all hosts, and yield the variables of its clients."""
    token = lab.shared / "ray-token"
    token.write_text(secrets.token_hex(32), encoding="ascii")
    token.chmod(0o600)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(SHARED / token.name)}
    # On a busy machine Ray's own 30 s are too few.
    variables["RAY_raylet_start_wait_time_s"] = f"{START_S:.0f}"
    head = lab.hosts[0]
    try:
        for host, num_cores in zip(lab.hosts, cores, strict=True):
            join_ray(lab, host, num_cores, variables)
        yield {**variables, "RAY_ADDRESS": f"{head.address}:{RAY_PORT}"}
    finally:
        for host in lab.hosts:
            host.end_all()


def join_ray(lab: Lab, host: Host, num_cores: int, variables: dict[str, str]) -> None:
    """Start Ray's processes on a host; the first host's is the head."""
    head = lab.hosts[0]
    role = (
        ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if host is head
        else [f"--address={head.address}:{RAY_PORT}"]
    )
    sizes = [f"--num-cpus={num_cores}", "--object-store-memory=100000000", "--disable-usage-stats"]
    words = [*RAY, "start", *role, f"--node-ip-address={host.address}", *sizes]
    name = f"ray-start-{host.name}"
    code = wait_for(host.start(words, lab.log(name), **variables), START_S)
    if code != 0:
        raise Failed(f"ray start on {host.name}: exit code {code}\n{lab.tail(name)}")


def actors(lab: Lab, kind: str) -> list[str]:
    """Return the host of each of Ray's actors of a kind."""
    return [host.name for host in lab.hosts for line in host.processes() if line.startswith(f"ray::{kind}.")]


def ray(lab: Lab) -> str:
    """Three ranks of Ray, one on each host: the records are those of one host, bit for bit."""
    lab.alone()
    words = [*MILLRACE, "train", "quickstart", *SETTINGS, "mesh.dp_shard=3", "mesh.launcher=ray", "name=ray"]
    with ray_cluster(lab, [1, 1, 1]) as variables:
        command = lab.hosts[0].start(words, lab.log("ray"), **variables)
        await_file(lab, "ray", "metrics.jsonl", [command])
        places = sorted(actors(lab, "Rank"))
        finish(lab, "ray", [command])
    if places != [host.name for host in lab.hosts]:
        raise Failed(f"the ranks ran on {', '.join(places)}")
    return f"{same(lab, 'ray')} records of ranks on {', '.join(places)} equal those of one host bit for bit"


def engines(lab: Lab) -> str:
    """Two ranks and an engine on three hosts; the engine's host vanishes, and another engine replaces it."""
    words = [*MILLRACE, "train", "quickstart", *SETTINGS, *ENGINES, "mesh.launcher=ray", "name=engines"]
    words += ["steps=40", "engine.delta_updates=true"]
    with ray_cluster(lab, [2, 1, 1]) as variables:
        command = lab.hosts[0].start(words, lab.log("engines"), **variables)
        await_file(lab, "engines", "checkpoints/step-*", [command])
        ranks, (engine,) = actors(lab, "Rank"), actors(lab, "EngineActor")
        if engine in ranks:
            raise Failed(f"ranks ran on {', '.join(ranks)}, and the engine beside them on {engine}")
        (place,) = (at for at, host in enumerate(lab.hosts) if host.name == engine)
        lab.hosts[place].vanish()
        lab.replace(place)
        join_ray(lab, lab.hosts[place], 1, {k: v for k, v in variables.items() if k != "RAY_ADDRESS"})
        finish(lab, "engines", [command])
    events = read_events(lab.run("engines") / "events.log")
    reasons = [event["reason"] for event in events if event["kind"] == "engine_lost"]
    joined = sum(event["kind"] == "engine_joined" for event in events)
    if check_log(events) or not reasons or joined < 2:
        raise Failed(f"{joined} engines joined, and lost were {reasons}")
    return (
        f"ranks on {', '.join(ranks)}, engine on {engine}, which vanished: another one joined, no group lost"
    )


def rate(lab: Lab) -> str:
    """Weight updates over a limited link, against a plain copy between the same hosts."""
    for host in lab.hosts:
        host.limit(LIMIT)
    try:
        plain = copy_rate(lab)
        words = [*MILLRACE, "train", "quickstart", *SETTINGS, *MODEL, "mesh.launcher=ray", "name=rate"]
        with ray_cluster(lab, [1, 1, 0]) as variables:
            command = lab.hosts[0].start(words, lab.log("rate"), **variables)
            await_file(lab, "rate", "metrics.jsonl", [command])
            await_apart(lab, "rate", command)
            finish(lab, "rate", [command])
    finally:
        for host in lab.hosts:
            host.limit(RATE)
    model, *_ = lab.run("rate").glob("checkpoints/*/model/*.safetensors")
    size, seconds = model.stat().st_size, update_seconds(lab.run("rate"))
    ours = 8 * size / statistics.median(seconds)
    return (
        f"{len(seconds)} updates of {size / 1e6:.0f} MB: {ours / 1e6:.0f} Mbit/s with verification, a plain "
        f"copy {plain / 1e6:.0f}, the link {LIMIT / 1e6:.0f}"
    )


def await_apart(lab: Lab, name: str, command: Popen[bytes]) -> None:
    """Wait until a run's rank and engine run; Failed if both are on one host, or do not start."""
    until(lambda: bool(actors(lab, "EngineActor")) or command.poll() is not None, RUN_S)
    places = actors(lab, "Rank"), actors(lab, "EngineActor")
    if [len(each) for each in places] != [1, 1] or places[0] == places[1]:
        raise Failed(f"the rank runs on {places[0]}, and the engine on {places[1]}\n{lab.tail(name)}")


def update_seconds(run: Path) -> list[float]:
    """Return the time of each weight update, from its event until the engine has verified it."""
    seconds, since_s = [], None
    for event in read_events(run / "events.log"):
        if event["kind"] == "update_weights":
            since_s = event["time_s"]
        elif event["kind"] == "weights_loaded" and since_s is not None:
            seconds.append(event["time_s"] - since_s)
            since_s = None
    return seconds


def copy_rate(lab: Lab) -> float:
    """Return the bit/s of one socket from the first host to the second."""
    first, second = lab.hosts[:2]
    receiver = second.start([sys.executable, "-c", RECEIVE, second.address], lab.log("receive"))
    sender = first.start([sys.executable, "-c", SEND, second.address], lab.log("send"))
    finish(lab, "receive", [receiver, sender])
    return 8 * COPY_BYTES / float(lab.log("receive").read_text().splitlines()[-1])


def workers(lab: Lab) -> str:
    """A server with a prefill and a decode worker on other hosts, of which the latter vanishes."""
    small_model(lab.shared / "model")
    token = secrets.token_hex(16)
    first, *others = lab.hosts
    for host in others:
        words = [*MILLRACE, "serve-worker", "--host", host.address, "--port", WORKER_PORT, "--threads", "1"]
        host.start(words, lab.log(f"workers-{host.name}"), MILLRACE_WORKER_TOKEN=token)
    serve = [*MILLRACE, "serve", str(SHARED / "model"), "--precision", "float32", "--token", token]
    roles = ["--prefill", "1", "--decode", "1", "--route", "apart"]
    roles += [word for host in others for word in ("--worker", f"{host.address}:{WORKER_PORT}")]
    first.start([*serve, "--port", ALONE_PORT], lab.log("alone-server"))
    first.start(
        [*serve, "--port", SERVER_PORT, *roles], lab.log("workers-host1"), MILLRACE_WORKER_TOKEN=token
    )
    for name in ("alone-server", "workers-host1"):
        await_server(lab, name)
    wanted, _ = asked(lab, ALONE_PORT, token)
    found, whole = asked(lab, SERVER_PORT, token)
    compare(found, wanted)
    if whole != 1:
        raise Failed(f"{whole:.0f} transfers brought all blocks, and not one\n{lab.tail('workers')}")
    (decode,) = [host for host in others if "decode-1 of" in lab.tail(f"workers-{host.name}")]
    decode.vanish()
    began_s = time.monotonic()
    found, _ = asked(lab, SERVER_PORT, token)
    took_s = time.monotonic() - began_s
    compare(found, wanted)
    lab.replace(lab.hosts.index(decode))
    return (
        f"tokens of one process, all blocks imported; {decode.name}, the decode worker's, vanished: the next "
        f"request took {took_s:.0f} s, same tokens"
    )


def await_server(lab: Lab, name: str) -> None:
    """Wait until a server answers; Failed if it does not start."""
    until(lambda: "answers at" in lab.tail(name) or "error: " in lab.tail(name), RUN_S)
    if "answers at" not in lab.tail(name):
        raise Failed(f"the server did not start\n{lab.tail('workers')}")


def asked(lab: Lab, port: str, token: str) -> tuple[list[Any], float]:
    """Ask a server on the first host; return tokens and log-probabilities, and the whole transfers so far."""
    host = lab.hosts[0]
    words = host.command([sys.executable, "-c", ASK, f"http://127.0.0.1:{port}", token])
    done = run_words(words, capture_output=True, text=True, check=False, timeout=RUN_S)
    if done.returncode:
        raise Failed(f"no answer: {done.stderr[-1000:]}\n{lab.tail('workers')}")
    found, whole = json.loads(done.stdout)
    return found, float(whole)


def compare(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Compare tokens, and log-probabilities up to the rounding of other batches; Failed if they differ."""
    for (tokens, logprobs), (theirs, their_logprobs) in zip(found, wanted, strict=True):
        most = max(abs(one - other) for one, other in zip(logprobs, their_logprobs, strict=True))
        if tokens != theirs or most > 1e-4:
            raise Failed(f"tokens {tokens} and not {theirs}; log-probabilities differ by up to {most:.1g}")


CASES: dict[str, Callable[[Lab], str]] = {
    "torchrun": torchrun,
    "ray": ray,
    "stall": stall,
    **{f"lost-{place + 1}": partial(lost, place=place) for place in range(NUM_HOSTS)},
    "engines": engines,
    "workers": workers,
    "rate": rate,
}


def check(lab: Lab, name: str) -> bool:
    """Run a case, print its line, end what it left, and return whether it holds."""
    began_s = time.monotonic()
    try:
        line, good = CASES[name](lab), True
    except Failed as error:
        line, good = str(error), False
    for host in lab.hosts:
        host.end_all()
    print(f"{'ok' if good else 'FAILED':6} {name:9} {time.monotonic() - began_s:4.0f} s  {line}", flush=True)
    return good


def main() -> int:
    """Run the cases in namespaces, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not given.inside:
        try:
            return inside([sys.executable, __file__, "--inside", *given.cases])
        except NoNamespaces as reason:
            print(f"skipped: {reason}")
            return SKIPPED
    signal.signal(signal.SIGTERM, interrupted)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    shared, logs = WORK / "shared", WORK / "logs"
    with network():
        shared.mkdir(parents=True)
        logs.mkdir()
        (shared / "scored.py").write_text(REWARD, encoding="utf-8")
        with hosts(NUM_HOSTS, shared, variables) as found:
            lab = Lab(found, shared, logs)
            good = [check(lab, name) for name in given.cases or CASES]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
