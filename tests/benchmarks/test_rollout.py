"""What the rollout benchmark hands out, counts and computes; nothing here looks at a clock."""

from __future__ import annotations

import random
import statistics
import sys

import pytest
import rollout
from peers import environments, floor, workers
from peers.workloads import FIRST_TOKENS, SHAPES, WORKLOADS, Workload, workload

from tests.close import close_fp64
from tests.house.source import ROOT

SIZES = {
    "greedy": (32, 4096, 128, 2048),
    "groups": (128, 18104, 512, 22776),
    "quickstart 128": (128, 460, 6, 1152),
    "quickstart 512": (512, 1843, 6, 4608),
    "quickstart 2048": (2048, 7404, 6, 18432),
    "nano": (256, 133_966, 1024, 142_827),
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", [*WORKLOADS, "nano"])
def test_a_workload_has_the_sizes_that_its_name_promises(name):
    one = workload(name)
    found = (len(one.prompts), one.num_drawn, max(one.lengths), sum(map(len, one.prompts)))
    assert (one.name, found) == (name, SIZES[name])
    assert all(0 <= token < SHAPES[one.shape]["vocab_size"] for prompt in one.prompts for token in prompt)
    longest = max(len(p) + n for p, n in zip(one.prompts, one.lengths, strict=True))
    assert longest <= SHAPES[one.shape]["max_position_embeddings"]


def test_nano_is_the_known_test_token_by_token():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    one = workload("nano")
    assert (one.prompts, one.lengths, one.temperature) == (prompts, lengths, 0.6)
    assert sum(lengths) == 133_966


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", [*WORKLOADS, "nano"])
def test_another_turn_has_other_prompts_of_the_same_lengths(name):
    one, other = workload(name, turn=0), workload(name, turn=-1)
    assert one.lengths == other.lengths
    assert [len(prompt) for prompt in one.prompts] == [len(prompt) for prompt in other.prompts]
    starts = {tuple(prompt[:8]) for prompt in one.prompts}
    assert not any(tuple(prompt[:8]) in starts for prompt in other.prompts)
    assert workload(name, turn=0) == one


def test_groups_are_eight_samples_of_sixteen_prompts_with_lengths_of_their_own():
    one = workload("groups")
    assert [one.prompts.count(prompt) for prompt in one.prompts] == [8] * 128
    assert len({tuple(prompt) for prompt in one.prompts}) == 16
    assert len(set(one.lengths)) > 80
    assert statistics.median(one.lengths) * 3 < max(one.lengths)


def test_turns_for_the_first_token_draw_one_token_each():
    one = workload("groups", turn=FIRST_TOKENS + 3)
    assert (one.num_drawn, len(one.prompts)) == (128, 128)


def test_quick_is_a_sixteenth_of_the_requests_and_an_eighth_of_the_tokens():
    one, quick = workload("quickstart 2048"), workload("quickstart 2048", quick=True)
    assert quick.prompts == one.prompts[:128]
    assert quick.lengths == [max(1, length // 8) for length in one.lengths[:128]]
    assert workload("greedy", quick=True).lengths == [16] * 8


def test_peers_read_what_was_written(tmp_path):
    one = workload("groups", turn=2)
    one.save(tmp_path / "groups.json")
    assert Workload.load(tmp_path / "groups.json") == one


def test_an_unknown_workload_is_named():
    with pytest.raises(
        ValueError, match="workload 'grops' is not known; there are greedy, groups,.* and nano"
    ):
        workload("grops")


def test_rates_are_of_the_median_run_and_ratios_are_ours_over_theirs():
    rates = rollout.rates(600, {"millrace": [2.0, 3.0, 9.0], "vllm": [6.0, 4.0], "generate": [30.0]})
    assert rates == {"millrace": 200.0, "vllm": 120.0, "generate": 20.0}
    ratios = rollout.ratios(rates)
    assert list(ratios) == ["vllm", "generate"]
    close_fp64([ratios["vllm"], ratios["generate"]], [5 / 3, 10.0])


def test_equal_tokens_are_counted_place_by_place():
    assert rollout.num_equal([[1, 2, 3], [4, 5]], [[1, 3, 2], [4, 5]]) == 3


def test_the_best_schedule_computes_every_token_once():
    one = Workload("mine", "rollout", [[1, 2, 3], [1, 2, 3], [7]], [1, 4, 2], 1.0)
    # Prompts of 3 and 1; then rows 1 and 2 at 4 and 2 known tokens, then row 1 at 5 and 6.
    assert floor.steps(one) == [
        floor.Step(tokens=4, draws=3, context=6 + 1, cache_reads=4),
        floor.Step(tokens=2, draws=2, context=6, cache_reads=6),
        floor.Step(tokens=1, draws=1, context=5, cache_reads=5),
        floor.Step(tokens=1, draws=1, context=6, cache_reads=6),
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_agree_with_a_count_request_by_request(name):
    one = workload(name)
    reads = sum(
        len(prompt) + generated
        for prompt, length in zip(one.prompts, one.lengths, strict=True)
        for generated in range(1, length)
    )
    steps = floor.steps(one)
    assert sum(step.draws for step in steps) == one.num_drawn
    assert sum(step.cache_reads for step in steps[1:]) == reads
    assert sum(step.tokens for step in steps[1:]) == one.num_drawn - len(one.prompts)


def test_nano_reads_as_many_keys_as_its_published_bound_says():
    reads = sum(step.cache_reads for step in floor.steps(workload("nano")))
    assert round(reads / 1e6, 2) == 120.94


def test_the_floor_is_the_slower_of_arithmetic_and_memory_step_by_step():
    shape = {
        "vocab_size": 10,
        "hidden_size": 4,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 5,
        "intermediate_size": 7,
    }
    assert floor.layer_products(shape) == [(20, 4), (4, 10), (14, 4), (4, 7)]
    weights = 3 * (80 + 40 + 56 + 28)
    one = Workload("mine", "rollout", [[1] * 6], [2], 0.0)
    operations = [2 * (6 * weights + 40) + 4 * 3 * 10 * 21, 2 * (weights + 40) + 4 * 3 * 10 * 7]
    moved = [(weights + 40) * 2 + cached * 2 * 3 * 5 * 2 for cached in (6, 7)]
    slow_memory = floor.Machine(1e30, 50.0)
    slow_products = floor.Machine(200.0, 1e30)
    close_fp64(floor.floor_s(one, shape, 2, slow_memory), sum(moved) / 50)
    close_fp64(floor.floor_s(one, shape, 2, slow_products), sum(operations) / 200)
    between = floor.Machine(1000.0, 500.0)
    assert operations[0] / 1000 > moved[0] / 500
    assert operations[1] / 1000 < moved[1] / 500
    close_fp64(floor.floor_s(one, shape, 2, between), operations[0] / 1000 + moved[1] / 500)


def test_layer_products_are_the_weights_of_the_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES["quickstart"]
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    matrices = sum(w.numel() for name, w in model.named_parameters() if "layers" in name and w.dim() == 2)
    products = sum(rows * columns for rows, columns in floor.layer_products(shape))
    assert products * shape["num_hidden_layers"] == matrices


@pytest.mark.slow
def test_the_rate_of_products_is_the_highest_of_any_number_of_rows_and_way(monkeypatch):
    # Two ways for each of three numbers of rows, then a sum and a copy of 512 MiB.
    found = iter([4.0, 2.0, 1.0, 8.0, 16.0, 32.0, 0.5, 2.0])
    monkeypatch.setattr(floor, "_seconds", lambda call, device, repeats: next(found))
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 3,
    }
    machine = floor.measure(shape, "float32", "cpu", repeats=1)
    weights = 6 * 2 + 2 * 2 + 6 * 2 + 2 * 3
    close_fp64(machine.flops_per_s, 2 * weights * max(128 / 2.0, 512 / 1.0, 2048 / 16.0))
    close_fp64(machine.bytes_per_s, 2**29 / 0.5)


def test_environments_stay_out_of_the_project():
    with pytest.raises(ValueError, match="--environments is .*, inside the project; name a folder outside"):
        environments.ensure("vllm", ROOT / "build" / "peers")


def test_an_unknown_peer_is_named(tmp_path):
    with pytest.raises(ValueError, match="peer 'sglang' is not known; .* are vllm and trl"):
        environments.ensure("sglang", tmp_path)


def test_a_complete_environment_is_used_as_it_is(tmp_path):
    (tmp_path / "trl" / "bin").mkdir(parents=True)
    (tmp_path / "trl" / "bin" / "python").touch()
    (tmp_path / "trl" / "complete").touch()
    assert environments.ensure("trl", tmp_path) == tmp_path / "trl" / "bin" / "python"


def test_libraries_to_preload_are_found_in_the_environment(tmp_path):
    (tmp_path / "lib").mkdir()
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (tmp_path / "lib" / name).touch()
    found = environments.preloads(tmp_path)
    assert found == [str(tmp_path / "lib" / name) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]


PEER = f"""
import sys
sys.path.append({str(ROOT / "benchmarks" / "peers")!r})
from serve import serve

class Peer:
    def __init__(self, folder, dtype, threads, device):
        self.missing = int(folder)
    def generate(self, one, *, logprobs):
        print("a line of a library")
        return [[logprobs * 5 + 1] * (length - self.missing) for length in one.lengths]
    def time_fractions(self, one):
        return {{"draw": len(one.prompts)}}

serve(Peer, ("numpy",))
"""


def start(tmp_path, missing):
    (tmp_path / "peer.py").write_text(PEER)
    command = workers.Command(str(tmp_path / "peer.py"), sys.executable)
    return workers.Worker(command, [missing, "float32", "1", "cpu"], 1, tmp_path / "log")


@pytest.mark.world
def test_a_peer_answers_jobs_in_a_process_of_its_own(tmp_path):
    worker = start(tmp_path, "0")
    workload("greedy", quick=True).save(tmp_path / "jobs.json")
    job = {"workload": str(tmp_path / "jobs.json"), "logprobs": True, "tokens": True}
    found = worker.ask(job)
    assert found["tokens"] == [[6] * 16] * 8
    assert worker.ask(job | {"tokens": False, "logprobs": False})["tokens"] is None
    assert worker.ask({"workload": job["workload"], "call": "time_fractions"}) == {"draw": 8}
    assert 5e6 < found["peak_bytes"] < 1e8  # a Python without torch, whatever this process holds
    assert list(worker.versions) == ["numpy"]
    worker.close()


@pytest.mark.world
def test_a_peer_that_draws_too_few_tokens_ends_the_benchmark(tmp_path):
    worker = start(tmp_path, "1")
    workload("greedy", quick=True).save(tmp_path / "jobs.json")
    with pytest.raises(
        SystemExit, match="(?s)peer.py ended; .*120 tokens were drawn for greedy; 128 were asked"
    ):
        worker.ask({"workload": str(tmp_path / "jobs.json"), "logprobs": True, "tokens": False})
    worker.close()


def test_a_step_of_the_scheduler_is_measured_with_every_request_running():
    found = rollout.scheduler_step(37, 5)
    assert found["requests"] == 37
    assert 0 < found["median_s"] <= found["p99_s"]
