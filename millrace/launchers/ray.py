"""The ranks of a run as Ray actors: placed, watched, and ended together.

Each actor is one rank: it runs the whole of `launch.train` in its own process. What we hand to it is the
recipe as YAML, names and numbers. Ray itself sends pickles between its processes, so whoever reaches one of
its ports can run code: a Ray that is started here listens on loopback alone, and asks for a token.
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
from millrace.launchers.supervise import GRACE_S, INTERRUPTED, LOST, failure, watch
from millrace.run.progress import RunReport

LOOPBACK = "127.0.0.1"
# How long Ray may take to start the processes of all ranks.
STARTING_S = 120.0
# Nothing large goes through Ray's own store; it takes no less.
STORE_BYTES = 100_000_000


class LeftAtOnce(Exception):
    """A rank was told twice to leave; the message says how to go on."""


def train(config: RunConfig, *, recipe: str = "run", quiet: bool = False) -> RunReport:
    """What `launch.train` does, on ranks that Ray places.

    Raises:
        RayTrainerError: Ray is not installed, or there is no room.
        RankFailed: a rank failed; the message holds its traceback. What has an error of its own in millrace,
            such as a mistake in the recipe, is raised as that.
        KeyboardInterrupt: the user pressed Ctrl-C twice.
    """
    text = to_yaml(config)
    return _run(config, lambda rank: rank.train.remote(text, recipe, quiet))


def resume(path: str | Path, *, quiet: bool = False) -> RunReport:
    """What `launch.resume` does, on ranks that Ray places.

    Raises:
        RunFolderError: it is not a run folder.
        RayTrainerError, RankFailed, KeyboardInterrupt: as `train`.
    """
    from millrace.run.launch import run_config

    return _run(run_config(path), lambda rank: rank.resume.remote(str(path), quiet))


class Rank:
    """One rank of a run, in a process that Ray started for it."""

    def __init__(self, rank: int) -> None:
        # All of them wait for torch here, at the same time.
        from millrace.distributed import ranks

        self._rank, self._ranks = rank, ranks

    def __repr__(self) -> str:
        """What Ray writes before each line that it prints for this rank."""
        return f"rank {self._rank}"

    def open_store(self, host: str) -> int:
        """Open the store by which the ranks find each other, at this machine's address: its port."""
        self._store = self._ranks.open_store(host)
        return self._store.port

    def settle(self, folder: str, environment: dict[str, str]) -> int:
        """Go where the command was given, and learn who the others are; gives this process's number.

        Raises:
            RanksError: this machine does not have the folder.
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
        """Run `launch.train` of a recipe given as YAML: the report, as JSON."""

        def work() -> RunReport:
            from millrace.run.launch import train

            return train(from_yaml(text, recipe), recipe=recipe, quiet=quiet)

        return _told(work)

    def resume(self, path: str, quiet: bool) -> str:
        """Run `launch.resume` of a run folder: the report, as JSON."""

        def work() -> RunReport:
            from millrace.run.launch import resume

            return resume(path, quiet=quiet)

        return _told(work)


def _told(work: Callable[[], RunReport]) -> str:
    # Ray's own handler would end the process. It has blocked Ctrl-C, which is passed on as this signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return json.dumps(asdict(work()))
    except KeyboardInterrupt as error:
        # By itself it would be taken for a cancelled task.
        raise LeftAtOnce(str(error)) from None


def _run(config: RunConfig, begin: Callable[[Any], Any]) -> RunReport:
    """Place the ranks of a run, begin its work on each, and wait for all of them."""
    num_ranks = config.mesh.num_ranks
    room = num_ranks + num_processes(config)
    with _cluster(room) as ray, _placed(ray, num_ranks, config.device) as (ranks, processes):
        work = [begin(rank) for rank in ranks]
        # The report of each rank, or its error.
        outcomes: dict[int, Any] = {}
        with _passed_on(ray, processes):
            failed = watch(lambda: _codes(ray, ranks, work, outcomes), num_ranks)
        if failed is None:
            return _result(outcomes)
        # The others find that it has gone, and the first of them writes so into the run's folder.
        ray.wait(work, num_returns=num_ranks, timeout=GRACE_S)
        error = outcomes[failed]
        cause = getattr(error, "cause", error)
        if type(cause).__module__.startswith("millrace."):
            raise cause from None
        what = f"rank {failed} of {num_ranks}"
        if isinstance(error, ray.exceptions.RayTaskError):
            raise failure(f"{what} failed", plain(error)) from None
        # The last line of many says how.
        raise failure(
            f"{what} has died (process {processes[failed][1]})", str(error).splitlines()[-1]
        ) from None


def _result(outcomes: Mapping[int, Any]) -> RunReport:
    """The first rank's report, unless one left at once."""
    for outcome in outcomes.values():
        if _code(outcome) == INTERRUPTED:
            raise KeyboardInterrupt(str(outcome.cause))
    return RunReport(**json.loads(outcomes[0]))


def _codes(ray: Any, ranks: Sequence[Any], work: Sequence[Any], outcomes: dict[int, Any]) -> dict[int, int]:
    """Take in what has ended since: the report of each rank or its error. The exit codes of all so far."""
    ended, _ = ray.wait(work, num_returns=len(work), timeout=0)
    for rank in {work.index(one) for one in ended} - outcomes.keys():
        try:
            outcomes[rank] = ray.get(work[rank])
        except ray.exceptions.RayError as error:
            outcomes[rank] = error
            # Its process is idle and still there; without it, the others see at once that it has left.
            ray.kill(ranks[rank])
    return {rank: _code(outcome) for rank, outcome in outcomes.items()}


def _code(outcome: Any) -> int:
    from millrace.distributed.ranks import lost_others

    if isinstance(outcome, str):
        return 0
    cause = getattr(outcome, "cause", outcome)
    if isinstance(cause, LeftAtOnce):
        return INTERRUPTED
    return LOST if lost_others(cause) else 1


@contextmanager
def _passed_on(ray: Any, processes: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Meanwhile Ctrl-C, and a request to end, go to every rank, each given by its node and process.

    The actors are busy with the run, and deaf to calls: a task beside each sends it a signal.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    def pass_on(number: int, frame: object) -> None:
        for node, process in processes:
            at = affinity(node, soft=False)
            ray.remote(_ask_to_end).options(num_cpus=0, scheduling_strategy=at).remote(process)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask_to_end(process: int) -> None:
    os.kill(process, signal.SIGTERM)


@contextmanager
def _cluster(num_actors: int) -> Iterator[Any]:
    """Ray, connected to the cluster that RAY_ADDRESS names, or to one of this machine for this run alone.

    Raises:
        RayTrainerError: Ray is not installed, or cannot be kept to this machine.
    """
    here = "RAY_ADDRESS" not in os.environ
    # Ray's sockets lie in the folder: their paths must be short, and nobody else may open them. Its processes
    # may write there until they are gone.
    place = tempfile.TemporaryDirectory(prefix="millrace-", dir="/tmp", ignore_cleanup_errors=True)
    with place as folder, _environment(here):
        ray = _imported()
        ray.init(logging_level="ERROR", **(_of_this_machine(num_actors, folder) if here else {}))
        try:
            if here and ray.util.get_node_ip_address() != LOOPBACK:
                raise RayTrainerError(
                    "ray was imported before it could be kept to this machine; import it later, or name a "
                    "cluster in RAY_ADDRESS"
                )
            yield ray
        finally:
            ray.shutdown()


def _of_this_machine(num_actors: int, folder: str) -> dict[str, Any]:
    return {
        "address": "local",
        # Ranks and engines may be more than cores, as with processes.
        "num_cpus": max(num_actors, os.cpu_count() or 1),
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "_temp_dir": folder,
    }


@contextmanager
def _environment(here: bool) -> Iterator[None]:
    """Meanwhile what Ray reads when it is imported and started; `here`: on this machine alone."""
    before = dict(os.environ)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_COLOR_PREFIX", "1" if sys.stdout.isatty() else "0")
    if here:
        # A token for this run alone; and loopback for an address, as where Ray does not do clusters.
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _imported() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise RayTrainerError(
            "mesh.launcher ray needs a package that is not installed; run `pip install 'millrace-rl[ray]'` "
            "or take it out"
        ) from None
    return ray


@contextmanager
def _placed(ray: Any, num_ranks: int, device: str) -> Iterator[tuple[list[Any], list[tuple[str, int]]]]:
    """An actor for each rank, neighbours on one machine where there is room; the node and process of each.

    Raises:
        RayTrainerError: the cluster has no room for all of them.
        RankFailed: one could not be started.
    """
    gpus = _gpus_of_each(ray, num_ranks, device)
    group = reserved(ray, num_ranks, {"CPU": 1, **({"GPU": 1} if gpus else {})})
    try:
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
        # By address, so that a rank is on the same machine when the run is taken up again.
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
        # It ends the actors too.
        ray.util.remove_placement_group(group)


def _gpus_of_each(ray: Any, num_ranks: int, device: str) -> int:
    """Whether each rank is to have a GPU: where the recipe says so, or says nothing and there are enough."""
    return int(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) >= num_ranks))


def _introduce(ray: Any, ranks: Sequence[Any], homes: Sequence[str], host: str) -> list[int]:
    """Tell each rank its number, that on its machine, and that they meet at `host`; gives their processes."""
    port = ray.get(ranks[0].open_store.remote(host), timeout=STARTING_S)
    shared = {
        "WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if len(set(homes)) == 1:
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    neighbours, so_far = Counter(homes), Counter[str]()
    told = []
    for rank, (actor, home) in enumerate(zip(ranks, homes, strict=True)):
        local = {"LOCAL_RANK": str(so_far[home]), "LOCAL_WORLD_SIZE": str(neighbours[home])}
        so_far[home] += 1
        told.append(actor.settle.remote(os.getcwd(), {**shared, **local, "RANK": str(rank)}))
    numbers: list[int] = ray.get(told, timeout=STARTING_S)
    return numbers
