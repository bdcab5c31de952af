"""A model behind HTTP, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from dataclasses import replace

import httpx
import pytest
import torch

from millrace.cli.serve import Workers, open_served, pool_sizes, report_drift
from millrace.data.tokenizers import load_tokenizer
from millrace.engines.engine_server import NoTexts
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_route import CostRoute, RoutePolicy
from millrace.errors import PlanError
from millrace.inference.engine import PagedEngine
from millrace.inference.server.service import GenerationService
from millrace.inference.step_probes import engine_identity
from millrace.models.load import load_model
from millrace.planner.engine_cost import EngineCost
from millrace.planner.engine_cost_file import write_cost
from millrace.planner.placement import Objective
from millrace.types import SamplingParams
from tests.clients import openai
from tests.inference.fresh import paged
from tests.models.tiny import tiny_model
from tests.planner.costs import measurement

LIMIT_S = 300.0  # of each wait; the longest test takes 45 s on two cores with six other programs


@pytest.fixture
def trained(lab):
    assert lab.train("steps=1", "--quiet").code == 0
    return lab


def best_model(run):
    return run / "checkpoints" / json.loads((run / "best.json").read_text())["checkpoint"] / "model"


@pytest.mark.slow
@pytest.mark.world
def test_a_run_is_served_until_sigterm(trained):
    run = trained.folder / "runs" / "tiny-1"
    best = best_model(run)
    words = ["--served-name", "sums", "--port", "0", "--weights-root", str(run)]
    words += ["--token", "asks", "--admin-token", "steers"]
    server = trained.start("serve", str(run), *words)
    try:
        line = server.stdout.readline()
        assert re.fullmatch(
            r"sums answers at http://127\.0\.0\.1:\d+/v1 \(a prompt and its answer have at most 64 tokens\); "
            r"Ctrl-C ends it\n",
            line,
        ), line + server.stderr.read()
        url = line.split()[3].removesuffix("/v1")
        assert httpx.get(f"{url}/version").status_code == 401
        with httpx.Client(
            base_url=url, headers={"Authorization": "Bearer steers"}, timeout=LIMIT_S
        ) as client:
            ask = {"prompt": "1+1=", "temperature": 0, "max_tokens": 3}
            choice = client.post("/v1/completions", json=ask).json()["choices"][0]
            (expected,) = trained("generate", "runs/tiny-1", "1+1=").out.splitlines() or ("",)
            assert choice["text"] == expected
            chat = {"messages": [{"role": "user", "content": "1+1="}], "temperature": 0, "max_tokens": 3}
            answer = client.post("/v1/chat/completions", json=chat)
            assert answer.json()["choices"][0]["message"]["content"] == choice["text"]
            asks = {"Authorization": "Bearer asks"}
            assert client.post("/v1/completions", json=ask, headers=asks).status_code == 200
            assert client.get("/fingerprint", headers=asks).status_code == 403
            before = client.get("/fingerprint").json()
            loaded = client.post("/update_weights", json={"path": str(best.relative_to(run)), "version": 7})
            assert loaded.json()["version"] == 7
            assert client.get("/fingerprint").json() == before | {"version": 7}
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=LIMIT_S)
    assert (server.returncode, errors) == (0, "")


@pytest.mark.slow
def test_without_tokens_new_ones_are_made_and_printed(trained):
    model = best_model(trained.folder / "runs" / "tiny-1")
    server = trained.start("serve", str(model), "--port", "0")
    try:
        url = server.stdout.readline().split()[3].removesuffix("/v1")
        lines = [server.stdout.readline() for _ in range(2)]
        asks, steers = (re.search(r": ([\w-]{32}) \(", line)[1] for line in lines)
        assert lines == [
            f"token for requests: {asks} (new at each start; --token sets one)\n",
            f"admin token, to steer it: {steers} (--admin-token sets one)\n",
        ]
        assert asks != steers
        for token, path, status in (
            ("", "/v1/models", 401),
            (asks, "/v1/models", 200),
            (asks, "/fingerprint", 403),
            (steers, "/fingerprint", 200),
        ):
            answer = httpx.get(
                url + path, headers={"Authorization": f"Bearer {token}".strip()}, timeout=LIMIT_S
            )
            assert answer.status_code == status
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=LIMIT_S)
    assert (server.returncode, errors) == (0, "")


def test_a_model_folder_is_served_under_its_own_name_and_template(trained):
    folder = best_model(trained.folder / "runs" / "tiny-1")
    options = {"name": None, "max_concurrent": 2, "max_waiting": 3, "precision": "bfloat16", "device": "cpu"}
    served = open_served(str(folder), None, cache_tokens=100, weights_root=None, **options)
    assert (served.name, served.template, served.dtype) == ("model", "chat", torch.bfloat16)
    assert served.max_length == 64
    assert served.tokenizer_folder == folder
    assert served.vocab_size > max(served.tokenizer.get_vocab().values())
    assert served.stop_token_ids[0] == served.tokenizer.eos_token_id
    # Whole blocks alone can be used.
    small = open_served(str(folder), None, cache_tokens=63, weights_root=None, **options)
    assert small.max_length == 48


@pytest.mark.world
def test_an_address_for_everybody_needs_a_token(lab):
    result = lab("serve", "runs/tiny-1", "--host", "0.0.0.0")
    assert (result.code, result.err) == (
        2,
        "error: host 0.0.0.0 can be reached from other machines; set a token with --token or the environment "
        "variable MILLRACE_TOKEN, or listen on 127.0.0.1\n",
    )
    # With a token the next mistake is found: there is no such model.
    lab.patch.setenv("MILLRACE_TOKEN", "secret")
    result = lab("serve", "runs/tiny-1", "--host", "0.0.0.0", "--port", "0")
    assert (result.code, result.err) == (1, "error: model folder runs/tiny-1 does not exist\n")


@pytest.mark.world
def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(lab):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = lab("serve", "runs/tiny-1", "--port", str(port))
    assert (result.code, result.err) == (
        2,
        f"error: port {port} of 127.0.0.1 cannot be used: Address already in use; choose another --host or "
        "--port\n",
    )


def test_a_root_that_is_no_folder_is_refused(lab):
    result = lab("serve", "runs/tiny-1", "--port", "0", "--weights-root", "gone")
    assert (result.code, result.err) == (2, "error: --weights-root gone is not a folder; make it first\n")


@pytest.mark.world
def test_a_checkpoint_of_a_model_folder_is_refused(trained):
    model = best_model(trained.folder / "runs" / "tiny-1")
    result = trained("serve", str(model), "--port", "0", "--checkpoint", "last")
    assert (result.code, result.err) == (
        2,
        f"error: --checkpoint has no effect because {model} is a model and not a run; leave it out\n",
    )


BOTH = ["--prefill", "1", "--decode", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--prefill", "1"],
            "--prefill and --decode need each other; give the number of processes of both",
        ),
        (
            ["--decode", "2"],
            "--prefill and --decode need each other; give the number of processes of both",
        ),
        (["--route", "apart"], "--route has no effect without --prefill and --decode; leave it out"),
        (["--apart-above", "9"], "--apart-above has no effect without --prefill and --decode; leave it out"),
        (
            ["--prefill", "1", "--decode", "1", "--route", "apart", "--apart-above", "9"],
            "--apart-above has no effect with --route apart; leave one out",
        ),
        (
            ["--cost", "c.json", "--ttft", "1"],
            "--ttft has no effect without --prefill, --decode and --cost; leave it out",
        ),
        ([*BOTH, "--tpot", "1"], "--tpot has no effect without --cost; leave it out"),
        (
            [*BOTH, "--cost", "c.json", "--route", "apart"],
            "--cost has no effect with --route apart; leave one out",
        ),
        (
            [*BOTH, "--cost", "c.json", "--apart-above", "9"],
            "--apart-above has no effect with --cost, which decides for each prompt; leave one out",
        ),
        (
            [*BOTH, "--cost", "c.json", "--ttft", "1"],
            "--cost with --prefill and --decode needs --ttft and --tpot: seconds to the first token, and of "
            "each further one, that requests may take",
        ),
        (
            [*BOTH, "--cost", "c.json", "--ttft", "0", "--tpot", "1"],
            "--ttft is 0; it must be above 0 and finite",
        ),
        (
            ["--worker", "a:1"],
            "--worker has no effect without --prefill and --decode; leave it out",
        ),
        (
            [*BOTH, "--worker", "a:1", "--cost", "c.json", "--ttft", "1", "--tpot", "1"],
            "--cost has no effect with --worker, the model of a worker of this machine; leave one out",
        ),
        (
            [*BOTH, "--worker", "a:1", "--worker", "a:1", "--worker-token", "t"],
            "2 workers need 2 addresses, and --worker gives 1; start as many of millrace serve-worker",
        ),
        (
            [*BOTH, "--worker", "a", "--worker-token", "t"],
            "--worker a is no address; write HOST:PORT",
        ),
    ],
)
def test_options_of_workers_without_effect_are_refused(lab, words, message):
    result = lab("serve", "runs/tiny-1", *words)
    assert (result.code, result.err) == (2, f"error: {message}\n")


def test_workers_share_the_memory_of_the_cache(trained):
    weights = load_model(best_model(trained.folder / "runs" / "tiny-1"), dtype=torch.float32)
    # Each of 8 requests has 64 tokens and a block.
    assert pool_sizes(weights, None, 8) == (8 * 80, 64)
    assert pool_sizes(weights, None, 8, num_engines=3) == (8 * 80 // 3 // 16 * 16, 64)
    assert pool_sizes(weights, None, 8, num_engines=9) == (80, 64)


def test_a_model_is_served_by_workers(trained):
    folder = best_model(trained.folder / "runs" / "tiny-1")
    options = {"name": None, "max_concurrent": 2, "max_waiting": 3, "precision": "float32", "device": "cpu"}
    workers = Workers(1, 2, RoutePolicy("apart", 0))
    served = open_served(str(folder), None, cache_tokens=100, weights_root=None, workers=workers, **options)
    assert (served.name, served.max_length) == ("model", 64)
    assert isinstance(served.engine, PrefillDecodeEngine)
    assert b"millrace:workers" in GenerationService(served, max_samples=3, texts=NoTexts()).meter.text()


@pytest.mark.slow
def test_the_official_client_streams_from_prefill_and_decode_workers(trained):
    folder = best_model(trained.folder / "runs" / "tiny-1")
    words = ["--prefill", "1", "--decode", "1", "--route", "apart", "--precision", "float32"]
    server = trained.start("serve", str(folder), "--port", "0", "--token", "asks", *words)
    prompt = "1+2=3 4+5=9 2+2=4 3+4=7 6+1=7 "
    try:
        url = server.stdout.readline().split()[3]
        with openai.OpenAI(base_url=url, api_key="asks", max_retries=0, timeout=LIMIT_S) as client:
            (model,) = client.models.list().data
            more = {"max_tokens": 12, "seed": 7, "temperature": 0.8, "extra_body": {"ignore_eos": True}}
            pieces = client.completions.create(model=model.id, prompt=prompt, stream=True, **more)
            text = "".join(choice.text for piece in pieces for choice in piece.choices)
            whole = client.completions.create(model=model.id, prompt=prompt, **more)
            with pytest.raises(openai.BadRequestError, match="logprobs is 3"):
                client.completions.create(model=model.id, prompt=prompt, stream=True, logprobs=3)
        metrics = httpx.get(
            f"{url.removesuffix('/v1')}/metrics", headers={"Authorization": "Bearer asks"}, timeout=LIMIT_S
        ).text
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=LIMIT_S)
    assert (server.returncode, errors) == (0, "")
    tokenizer = load_tokenizer(folder)
    engine = paged(load_model(folder, dtype=torch.float32))
    params = SamplingParams(max_tokens=12, seed=7, temperature=0.8)
    (expected,) = engine.generate([tokenizer(prompt)["input_ids"]], [params])
    assert text == whole.choices[0].text == tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    # The prompt was computed by the one worker and generated from by the other.
    imported = re.search(r"^millrace:prompt_tokens_imported_total\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
    assert float(imported[1]) > 0


def test_workers_are_placed_by_a_cost_model_of_theirs_alone(trained, tmp_path):
    folder, path = best_model(trained.folder / "runs" / "tiny-1"), tmp_path / "cost.json"
    options = {"name": None, "max_concurrent": 2, "max_waiting": 3, "precision": "float32", "device": "cpu"}
    route = RoutePolicy("adaptive", 256, CostRoute(path, Objective(1.0, 0.1)))

    def opened():
        workers = Workers(1, 2, route)
        return open_served(str(folder), None, cache_tokens=100, weights_root=None, workers=workers, **options)

    with pytest.raises(
        PlanError, match="cost.json: No such file or directory; write it with millrace measure"
    ):
        opened()
    weights = load_model(folder, dtype=torch.float32)
    engine = PagedEngine(weights, lambda tokens: "", max_cache_tokens=64, max_batch_tokens=8192)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    identity = replace(engine_identity(weights, engine), num_threads=threads)
    write_cost(replace(measurement(), engine=replace(identity, num_threads=threads + 1)), path)
    with pytest.raises(
        PlanError, match=f"its num_threads is {threads + 1} and not {threads}; measure this one"
    ):
        opened()
    write_cost(replace(measurement(), engine=identity), path)
    assert isinstance(opened().engine, PrefillDecodeEngine)


def test_steps_that_leave_the_cost_model_of_the_engine_are_reported(tmp_path):
    model, path = tiny_model("qwen3"), tmp_path / "cost.json"
    engine = paged(model)
    write_cost(measurement(), path)
    with pytest.raises(PlanError, match="was measured on another engine: its .*; measure this one"):
        report_drift(engine, model, path)
    found = replace(measurement(), engine=engine_identity(model, engine), cost=EngineCost(1e6, 0, 0, 0, 0))
    write_cost(found, path)
    report_drift(engine, model, path)
    with pytest.warns(UserWarning, match="steps take 0.00 times as long as the cost model") as warned:
        for _ in range(3):
            engine.generate([(1, 2, 3)], [SamplingParams(max_tokens=50)])
    assert len(warned) == 1
