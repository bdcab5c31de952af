"""Ranks that torchrun starts on three hosts have the records of one host, bit for bit; a table.

The hosts are Linux namespaces (scripts/hosts.py) with addresses, names, processes, /tmp, /dev/shm and HOME
of their own. They share a folder for data and runs, and the checkout. It needs root, or a system that allows
user namespaces.

    python scripts/cluster.py

Exit code 0: all cases hold. 1: one does not. 77: this machine does not allow namespaces; nothing was run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from hosts import (
    ROOT,
    SHARED,
    Host,
    NoNamespaces,
    hosts,
    inside,
    interrupted,
    network,
    wait_for,
)

from millrace.observability.files import read_json_lines

NUM_HOSTS = 3
SKIPPED = 77
PORT = "29500"
# Timeout of a run: a minute on a quiet machine.
RUN_S = 900.0
MILLRACE = [sys.executable, "-m", "millrace.cli.main"]
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
    f"output={SHARED}/runs",
]
# A reward that differs within a group, in a file that only the shared folder has.
REWARD = """
def length(prompt, completion, answer, row):
    return len(completion) % 3 / 2
"""


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


CASES: dict[str, Callable[[Lab], str]] = {
    "torchrun": torchrun,
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
