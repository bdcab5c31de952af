"""What Prometheus reads."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.inference.server.prometheus import Meter
from millrace.types import Completion
from tests.inference.server.running import fake_served, running


def samples(text: str) -> dict[str, float]:
    """Each number by its name and its labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def completion(versions: list[int], reason="stop") -> Completion:
    count = len(versions)
    return Completion((1,) * count, np.zeros(count, np.float32), np.array(versions, np.int32), reason, "")


@pytest.mark.world
def test_the_numbers_of_the_engine_are_told():
    with running() as mill:
        answer = mill.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = samples(answer.text)
        assert found["vllm:num_requests_running"] == 0
        assert found["vllm:num_requests_waiting"] == 0
        assert found["vllm:kv_cache_usage_perc"] == 0.25
        assert found["vllm:prefix_cache_queries_total"] == 70
        assert found["vllm:prefix_cache_hits_total"] == 30
        assert found["vllm:num_preemptions_total"] == 2
        assert found["vllm:prompt_tokens_total"] == 11
        assert found["vllm:generation_tokens_total"] == 17
        assert found["millrace:policy_version"] == 3
        assert found["millrace:prompt_tokens_computed_total"] == 5
        assert found["millrace:prompt_tokens_imported_total"] == 6
        assert found["millrace:kv_blocks_refused_total"] == 1
        assert found["millrace:kv_leased_blocks"] == 4
        assert found["millrace:kv_imported_fraction"] == 0.75
        assert 'model_name="mill"' in answer.text


@pytest.mark.world
def test_each_sample_is_counted_once_with_its_lengths_and_times():
    with running(fake_served(delay_s=0.02)) as mill:
        ask = {"prompt": [5, 6, 7], "n": 2, "max_tokens": 4, "ignore_eos": True}
        for stream in (False, True):
            assert mill.post("/v1/completions", ask | {"stream": stream}).status_code == 200
        found = samples(mill.get("/metrics").text)
        assert found["vllm:request_success_total{'finished_reason': 'length'}"] == 4
        assert found["vllm:request_prompt_tokens_count"] == 4
        assert found["vllm:request_prompt_tokens_sum"] == 12
        assert found["vllm:request_generation_tokens_sum"] == 16
        assert found["vllm:time_to_first_token_seconds_count"] == 4
        assert found["vllm:time_to_first_token_seconds_bucket{'le': '0.01'}"] == 0
        # Pieces of 1, 2 and 1 tokens: three of the four come after the first.
        assert found["vllm:inter_token_latency_seconds_count"] == 12
        assert found["vllm:e2e_request_latency_seconds_count"] == 4
        assert found["vllm:e2e_request_latency_seconds_sum"] >= 4 * 3 * 0.02
        assert found["millrace:tokens_by_version_lag_total{'lag': '0'}"] == 16


def test_tokens_are_counted_by_how_old_their_weights_are():
    meter = Meter("mill", fake_served().engine)
    meter.ended(3, completion([7, 7, 8, 9]), 1.0, version=9)
    meter.ended(3, completion([]), 1.0, version=9)
    meter.ended(3, completion([1, 2], "abort"), 1.0, version=17)
    found = samples(meter.text().decode())
    lags = {name: value for name, value in found.items() if "lag_total" in name}
    assert lags == {
        f"millrace:tokens_by_version_lag_total{{'lag': '{lag}'}}": count
        for lag, count in (("0", 1), ("1", 1), ("2", 2), ("15", 1), ("16+", 1))
    }
    assert found["vllm:request_success_total{'finished_reason': 'abort'}"] == 1


def test_the_time_of_a_piece_is_shared_by_its_tokens():
    meter = Meter("mill", fake_served().engine)
    meter.next_tokens(3, 0.03)
    found = samples(meter.text().decode())
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_bucket{'le': '0.005'}"] == 0
    assert found["vllm:inter_token_latency_seconds_bucket{'le': '0.01'}"] == 3
