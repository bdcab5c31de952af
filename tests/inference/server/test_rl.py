"""Tokens in and out, and the verbs of reinforcement learning."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from millrace.inference.server.rl import allowed_folder
from millrace.version import __version__
from tests.inference.server.running import asking, fake_served, running, tokenizer

ASK = {"prompt_token_ids": [5, 6], "max_tokens": 7, "seed": 9}


@pytest.fixture(scope="module")
def mill():
    with running() as found:
        yield found


def write_model(folder, **tensors):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.world
def test_tokens_go_in_and_come_out_with_their_versions(mill):
    answer = mill.post("/generate", ASK | {"n": 2, "request_id": "mine"}).json()
    first, second = answer["completions"]
    assert answer["id"] == "mine"
    assert first == {
        "index": 0,
        "token_ids": [mill.engine.token((5, 6), 9, position) for position in range(7)],
        "logprobs": [-n / 8 for n in range(1, 8)],
        "versions": [3] * 7,
        "finish_reason": "length",
        "reason": "",
        "text": tokenizer().decode(first["token_ids"]),
        "support": None,
        "prompt_logprobs": None,
        "prompt_top": None,
    }
    assert second["index"] == 1
    assert second["token_ids"] != first["token_ids"]


@pytest.mark.world
def test_the_lines_of_a_stream_are_the_whole_answer(mill):
    whole = mill.post("/generate", ASK | {"n": 3}).json()["completions"]
    answer = mill.post("/generate", ASK | {"n": 3, "stream": True})
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    found = [{"index": n, "token_ids": [], "logprobs": [], "versions": []} for n in range(3)]
    for line in map(json.loads, answer.text.splitlines()):
        of = found[line.pop("index")]
        assert line.pop("id").startswith("gen-")
        for key, value in line.items():
            of[key] = of[key] + value if key in ("token_ids", "logprobs", "versions") else value
    assert found == whole


@pytest.mark.world
def test_what_a_trainer_asks_for_reaches_the_engine(mill):
    more = {"logprobs": "raw", "prompt_logprobs": True, "request_id": "all", "ignore_eos": True}
    mill.post("/generate", {"prompt_token_ids": [5], "max_tokens": 3} | more)
    params = mill.engine.params["all-0"]
    assert (params.logprobs, params.prompt_logprobs, params.stop_token_ids) == ("raw", True, ())
    mill.post("/generate", {"prompt_token_ids": [5], "max_tokens": 3, "request_id": "few"})
    params = mill.engine.params["few-0"]
    assert (params.logprobs, params.prompt_logprobs) == ("processed", False)
    assert params.stop_token_ids == (tokenizer().eos_token_id,)


@pytest.mark.world
def test_a_failure_in_a_stream_is_its_last_line(mill):
    mill.engine.broken = 5
    try:
        lines = mill.post("/generate", ASK | {"stream": True}).text.splitlines()
    finally:
        mill.engine.broken = None
    assert len(json.loads(lines[0])["token_ids"]) > 0
    assert json.loads(lines[-1])["error"]["message"] == "the request failed: its logits are not finite"


@pytest.mark.world
def test_an_aborted_request_gives_what_there_is_to_both():
    with running(fake_served(delay_s=0.02)) as mill, asking(mill, request_id="mine", n=2) as answer:
        lines = answer.iter_lines()
        next(lines)
        ended = mill.post("/abort", {"id": "mine"}).json()["completions"]
        heard = [json.loads(line) for line in lines]
        assert [one["finish_reason"] for one in ended] == ["abort", "abort"]
        assert sorted(line["index"] for line in heard if line.get("finish_reason") == "abort") == [0, 1]
        gone = mill.post("/abort", {"id": "mine"})
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == "there is no unfinished request mine"


@pytest.mark.world
def test_the_verbs_reach_the_engine_and_tell_its_state(mill):
    mill.engine.calls.clear()
    assert mill.post("/pause", {"mode": "keep"}).json() == {"version": 3, "num_running": 0, "num_waiting": 0}
    assert mill.post("/sleep", {"tags": ["kv_cache"]}).status_code == 200
    assert mill.post("/wake", {"tags": ["kv_cache", "weights"]}).status_code == 200
    assert mill.post("/resume").status_code == 200
    assert mill.engine.calls == [
        ("pause", "keep"),
        ("sleep", "kv_cache"),
        ("wake", "kv_cache", "weights"),
        ("resume",),
    ]
    assert mill.get("/version").json() == {"millrace": __version__, "version": 3}
    about = {"served_model_name": "mill", "is_generation": True, "weight_version": "3"}
    assert mill.get("/model_info").json() == mill.get("/server_info").json() == about
    assert mill.get("/fingerprint").json() == {"version": 3, "fingerprint": {"weight": "0123"}}


@pytest.mark.world
def test_a_pause_that_takes_too_long_says_so():
    with running(fake_served(delay_s=60.0)) as mill, asking(mill):
        answer = mill.post("/pause", {"mode": "finish", "timeout_s": 0.25})
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "pause(finish) waited 0.25 s"


@pytest.mark.world
def test_weights_come_from_below_the_root_alone(tmp_path):
    root = tmp_path / "weights"
    write_model(
        root / "step", weight=torch.ones(2, dtype=torch.float64), count=torch.ones(1, dtype=torch.int32)
    )
    write_model(root / "extra", extra=torch.ones(2))
    write_model(root / "asleep", asleep=torch.ones(2))
    write_model(tmp_path / "outside", weight=torch.ones(2))
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "empty").mkdir()
    (root / "mixed").mkdir()
    (root / "mixed" / "config.json").write_text("{}")
    (root / "mixed" / "model.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{}")
    (root / "broken" / "model.safetensors").write_bytes(b"abc")
    with running(weights_root=root) as mill:
        for path in ("step", str(root / "step")):
            answer = mill.post("/update_weights", {"path": path, "version": 4, "kv": "keep"})
            assert answer.json()["version"] == 4
            dtypes = {"weight": torch.float32, "count": torch.int32}
            assert mill.engine.calls.pop() == ("update_weights", dtypes, "keep")
        outside = "is not below the server's weights root; put the folder there"
        for path, status, message in (
            ("../outside", 403, f"../outside {outside}"),
            ("link", 403, f"link {outside}"),
            ("/etc", 403, f"/etc {outside}"),
            ("a\0b", 403, None),
            ("mixed", 400, "model.safetensors is a symbolic link; put the file itself into the folder"),
            ("empty", 400, "has no config.json"),
            ("broken", 400, "the weights cannot be read: "),
            ("extra", 400, "weight extra is not one of the engine's"),
            ("asleep", 409, "the weights are asleep"),
        ):
            answer = mill.post("/update_weights", {"path": path, "version": 5})
            assert answer.status_code == status, path
            assert message is None or message in answer.json()["error"]["message"]
        assert mill.engine.version == 4


@pytest.mark.world
def test_without_a_root_no_weights_are_loaded(mill):
    answer = mill.post("/update_weights", {"path": "step", "version": 4})
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == (
        "this server loads no weights; start it with --weights-root FOLDER"
    )


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real" / "step").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert allowed_folder(tmp_path / "root", "step") == tmp_path / "real" / "step"


@pytest.mark.world
def test_text_becomes_tokens_and_tokens_text(mill):
    for text in ("the wheel", " 水車, naïve"):
        answer = mill.post("/tokenize", {"prompt": text, "model": "mill"}).json()
        tokens = tokenizer()(text)["input_ids"]
        assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": 64}
        assert mill.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    end = tokenizer().eos_token_id
    assert mill.post("/detokenize", {"tokens": [end]}).json() == {"prompt": tokenizer().eos_token}
    messages = [{"role": "user", "content": "turns?"}]
    expected = tokenizer()("<user>turns?<assistant>")["input_ids"]
    assert mill.post("/tokenize", {"messages": messages}).json()["tokens"] == expected
