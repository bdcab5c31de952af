"""Place, monitor and end the ranks of a run as Ray actors.

Each actor is one rank and runs `loop.train` in its own process. Its arguments are the recipe as YAML, names
and numbers. Ray itself exchanges pickles between its processes, so access to one of its ports means code
execution. A Ray that is started here therefore listens on loopback only and demands a token.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.config.recipe import from_yaml, to_yaml
from millrace.config.settings import RunConfig, num_processes
from millrace.engines.ray_placement import RayTrainerError, plain, reserved
from millrace.launchers.supervise import (
    GRACE_S,
    INTERRUPTED,
    LOOPBACK,
    LOST,
    failure,
    handled,
    rendezvous,
    watch,
)
from millrace.processes.worker import collect_rarely
from millrace.run.folder import RunFolder
from millrace.run.progress import RunReport

# Timeout for the start of all rank processes.
STARTING_S = 120.0
# Part of Ray's message where its own processes took longer than 30 s, a limit that cannot be set.
SLOW_START = "timed out during startup"
# Ray's minimum: nothing large goes through its object store.
STORE_BYTES = 100_000_000


class LeftAtOnce(Exception):
    """A rank was interrupted twice; the message explains how to resume."""


def train(config: RunConfig, *, recipe: str = "run", quiet: bool = False) -> RunReport:
    """Run `loop.train` on ranks that Ray places.

    Raises:
        RayTrainerError: Ray is not installed, or the cluster has too few resources.
        RankFailed: a rank failed; the message holds its traceback. An error with a class of its own in
            millrace, such as a mistake in the recipe, is raised as that class.
        KeyboardInterrupt: the user pressed Ctrl-C twice.
    """
    text = to_yaml(config)
    return _run(config, lambda rank: rank.train.remote(text, recipe, quiet))


def resume(path: str | Path, *, quiet: bool = False) -> RunReport:
    """Run `loop.resume` on ranks that Ray places; RunFolderError if the folder is none of a run."""
    return _run(RunFolder.open(path).config(), lambda rank: rank.resume.remote(str(path), quiet))


class Rank:
    """Ray actor that runs one rank."""

    def __init__(self, rank: int) -> None:
        collect_rarely()
        # All ranks import torch here, concurrently.
        from millrace.distributed import ranks

        self._rank, self._ranks = rank, ranks

    def __repr__(self) -> str:
        """Return the prefix that Ray prints before each log line of this actor."""
        return f"rank {self._rank}"

    def open_store(self, host: str) -> int:
        """Open the rendezvous store at this machine's address and return its port."""
        self._store = self._ranks.open_store(host)
        return self._store.port

    def settle(self, folder: str, environment: dict[str, str]) -> int:
        """Set the working directory, and the variables that torchrun sets; return the process id.

        Raises RanksError if this machine does not have the folder, that of the launching command.
        """
        if not Path(folder).is_dir():
            raise self._ranks.RanksError(
                f"machine {os.uname().nodename} has no folder {folder}, where the command was given; "
                "ranks on several machines need a file system that all of them share"
            )
        os.chdir(folder)
        os.environ.update(environment)
        return os.getpid()

    def train(self, text: str, recipe: str, quiet: bool) -> str:
        """Run `loop.train` of a recipe given as YAML, and return the report as JSON."""
        return _told(lambda loop: loop.train(from_yaml(text, recipe), recipe=recipe, quiet=quiet))

    def resume(self, path: str, quiet: bool) -> str:
        """Run `loop.resume` of a run folder, and return the report as JSON."""
        return _told(lambda loop: loop.resume(path, quiet=quiet))


def _told(work: Callable[[Any], RunReport]) -> str:
    """Call a function of the module `run.loop`, and return its report as JSON."""
    # Replace Ray's handler, which would exit. Ray blocks SIGINT, so Ctrl-C is forwarded as SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from millrace.run import loop

        return json.dumps(asdict(work(loop)))
    except KeyboardInterrupt as error:
        # Ray would treat a bare KeyboardInterrupt as a cancelled task.
        raise LeftAtOnce(str(error)) from None


def _run(config: RunConfig, begin: Callable[[Any], Any]) -> RunReport:
    num_ranks = config.mesh.num_ranks
    room = num_ranks + num_processes(config)
    with _cluster(room) as ray, _placed(ray, num_ranks, config.device) as (ranks, processes):
        work = [begin(rank) for rank in ranks]
        # Report or error of each finished rank.
        outcomes: dict[int, Any] = {}
        with _passed_on(ray, processes):
            failed = watch(lambda: _codes(ray, ranks, work, outcomes), num_ranks)
        if failed is None:
            return _result(outcomes)
        # The other ranks detect the loss, and the first of them logs it in the run folder.
        ray.wait(work, num_returns=num_ranks, timeout=GRACE_S)
        error = outcomes[failed]
        cause = getattr(error, "cause", error)
        if type(cause).__module__.startswith("millrace."):
            raise cause from None
        what = f"rank {failed} of {num_ranks}"
        if isinstance(error, ray.exceptions.RayTaskError):
            raise failure(f"{what} failed", plain(error)) from None
        # The last line of the message gives the cause.
        raise failure(
            f"{what} has died (process {processes[failed][1]})", str(error).splitlines()[-1]
        ) from None


def _result(outcomes: Mapping[int, Any]) -> RunReport:
    for outcome in outcomes.values():
        if _code(outcome) == INTERRUPTED:
            raise KeyboardInterrupt(str(outcome.cause))
    return RunReport(**json.loads(outcomes[0]))


def _codes(ray: Any, ranks: Sequence[Any], work: Sequence[Any], outcomes: dict[int, Any]) -> dict[int, int]:
    """Collect the report or error of each newly finished rank, and return all exit codes so far."""
    ended, _ = ray.wait(work, num_returns=len(work), timeout=0)
    for rank in {work.index(one) for one in ended} - outcomes.keys():
        try:
            outcomes[rank] = ray.get(work[rank])
        except ray.exceptions.RayError as error:
            outcomes[rank] = error
            # Its process is idle but alive; killing it lets the other ranks detect the loss at once.
            ray.kill(ranks[rank])
    return {rank: _code(outcome) for rank, outcome in outcomes.items()}


def _code(outcome: Any) -> int:
    if isinstance(outcome, str):
        return 0
    cause = getattr(outcome, "cause", outcome)
    if isinstance(cause, LeftAtOnce):
        return INTERRUPTED
    # It imports torch, which a run that ends well does not need here.
    from millrace.distributed.ranks import lost_others

    return LOST if lost_others(cause) else 1


@contextmanager
def _passed_on(ray: Any, processes: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Forward Ctrl-C and SIGTERM to every rank, given by its node and process id.

    A busy actor accepts no calls, so a task on the same node sends the signal.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    def pass_on(number: int, frame: object) -> None:
        for node, process in processes:
            at = affinity(node, soft=False)
            ray.remote(_ask_to_end).options(num_cpus=0, scheduling_strategy=at).remote(process)

    with handled({signal.SIGINT: pass_on, signal.SIGTERM: pass_on}):
        yield


def _ask_to_end(process: int) -> None:
    os.kill(process, signal.SIGTERM)


@contextmanager
def _cluster(num_actors: int) -> Iterator[Any]:
    """Connect Ray to the cluster of RAY_ADDRESS, or start a local one for this run."""
    here = "RAY_ADDRESS" not in os.environ
    # The folder holds Ray's sockets, so its path must be short and its access restricted to this user. Ray's
    # processes may write there until they exit.
    place = tempfile.TemporaryDirectory(prefix="millrace-", dir="/tmp", ignore_cleanup_errors=True)
    with place as folder, _environment(here):
        try:
            import ray
        except ModuleNotFoundError:
            raise RayTrainerError(
                "mesh.launcher ray needs a package that is not installed; run "
                "`pip install 'millrace-rl[ray]'` or take it out"
            ) from None
        local = {
            "address": "local",
            # Ranks and engines may outnumber the cores, as with local processes.
            "num_cpus": max(num_actors, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_temp_dir": folder,
        }
        _start(ray, local if here else {})
        try:
            if here and ray.util.get_node_ip_address() != LOOPBACK:
                raise RayTrainerError(
                    "ray was imported before it could be kept to this machine; import it later, or name a "
                    "cluster in RAY_ADDRESS"
                )
            yield ray
        finally:
            ray.shutdown()


def _start(ray: Any, options: Mapping[str, Any]) -> None:
    """Start or connect Ray, twice if need be: a busy machine may need more than the 30 s that Ray allows."""
    try:
        ray.init(logging_level="ERROR", **options)
    except Exception as error:  # Ray raises no narrower one
        if SLOW_START not in str(error):
            raise
        ray.shutdown()
        try:
            ray.init(logging_level="ERROR", **options)
        except Exception as again:
            raise RayTrainerError(
                f"Ray did not start, twice: {again} Run again when the machine is less busy, or name a "
                "running cluster in RAY_ADDRESS"
            ) from error


@contextmanager
def _environment(here: bool) -> Iterator[None]:
    """Set the variables that Ray reads at import and start; `here` restricts it to this machine."""
    before = dict(os.environ)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_COLOR_PREFIX", "1" if sys.stdout.isatty() else "0")
    if here:
        # A token for this run only; the last variable makes Ray use the loopback address.
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )
        # Ray's own value is 15: beside other programs such ranks and engines get hardly any processor time.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _placed(ray: Any, num_ranks: int, device: str) -> Iterator[tuple[list[Any], list[tuple[str, int]]]]:
    """Place one actor per rank, neighbours on one machine if possible; yield actors and (node, process)s."""
    gpus = _gpus_of_each(ray, num_ranks, device)
    group = reserved(ray, num_ranks, {"CPU": 1, **({"GPU": 1} if gpus else {})})
    try:
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
        # Sorted by address, so that a resumed run places each rank on the same machine.
        bundles = sorted(node_of, key=lambda bundle: (address[node_of[bundle]], node_of[bundle], bundle))
        homes = [node_of[bundle] for bundle in bundles]
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        ranks = [
            ray.remote(Rank)
            .options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy(group, bundle))
            .remote(rank)
            for rank, bundle in enumerate(bundles)
        ]
        try:
            numbers = _introduce(ray, ranks, homes, address[homes[0]])
        except ray.exceptions.RayActorError as error:
            raise failure("a rank could not be started", plain(error)) from None
        except ray.exceptions.GetTimeoutError:
            raise RayTrainerError(f"Ray did not start {num_ranks} ranks within {STARTING_S:.0f} s") from None
        yield ranks, list(zip(homes, numbers, strict=True))
    finally:
        # This ends the actors too.
        ray.util.remove_placement_group(group)


def _gpus_of_each(ray: Any, num_ranks: int, device: str) -> int:
    return int(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) >= num_ranks))


def _introduce(ray: Any, ranks: Sequence[Any], homes: Sequence[str], host: str) -> list[int]:
    """Set up the environment of all ranks for a rendezvous at `host`, and return their process ids."""
    port = ray.get(ranks[0].open_store.remote(host), timeout=STARTING_S)
    shared = rendezvous(len(ranks), host, port, one_machine=len(set(homes)) == 1)
    neighbours, so_far = Counter(homes), Counter[str]()
    told = []
    for rank, (actor, home) in enumerate(zip(ranks, homes, strict=True)):
        local = {"LOCAL_RANK": str(so_far[home]), "LOCAL_WORLD_SIZE": str(neighbours[home])}
        so_far[home] += 1
        told.append(actor.settle.remote(os.getcwd(), {**shared, **local, "RANK": str(rank)}))
    numbers: list[int] = ray.get(told, timeout=STARTING_S)
    return numbers
