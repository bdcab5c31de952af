"""What is sent to SGLang, held against SGLang's own source and schema; both are in its wheel.

`SGLANG_WHEEL` names it. Without one, the dialect is held against recorded facts, and the twin of
`test_sglang_dialect` refuses what they lack.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from millrace.engines.sglang_checksums import VERB
from millrace.engines.sglang_dialect import TESTED
from millrace.types import SamplingParams
from tests.engines.sglang_twin import RECORDED
from tests.engines.sglang_wheel import Source, facts_of
from tests.engines.test_sglang_dialect import Lab, the_model, with_twin

WHEEL = os.environ.get("SGLANG_WHEEL", "")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="set SGLANG_WHEEL to a wheel of SGLang")


def calls() -> list[tuple[str, Any]]:
    """All that the dialect sends: a start, an update of either kind, completions, an abort."""

    async def use(lab: Lab) -> list[tuple[str, Any]]:
        await lab.probe()
        await lab.load(the_model(3), 1)
        for number, params in enumerate(
            (
                SamplingParams(max_tokens=2, temperature=0.7, seed=1 << 63, stop_token_ids=(3,)),
                SamplingParams(max_tokens=2, top_k=5, stop=("x",)),
                SamplingParams(max_tokens=2, top_p=0.5),
            )
        ):
            await lab.dialect.generate(f"{number}", (5, 6), params)
        await lab.dialect.abort(["0"])
        return lab.client.calls

    return [*with_twin(use), *with_twin(use, kv="keep")]


@pytest.mark.slow
def test_only_recorded_names_are_sent() -> None:
    assert RECORDED["version"] == TESTED
    sent = calls()
    assert {path for path, _ in sent} - {"/metrics"} <= set(RECORDED["verbs"])
    assert VERB in {path for path, _ in sent}
    for path, body in sent:
        assert set(body or ()) <= set(RECORDED["verbs"].get(path, {"fields": ()})["fields"])
        if path == "/generate":
            # Unknown ones are ignored there, without a word.
            assert set(body) <= set(RECORDED["generate_contract"])
            assert set(body["sampling_params"]) <= set(RECORDED["sampling_params"])
        if path == "/pause_generation":
            assert body["mode"] in RECORDED["pause_modes"]


@needs_wheel
def test_the_recorded_facts_are_those_of_the_wheel() -> None:
    assert facts_of(Path(WHEEL)) == RECORDED


def contract(folder: Path) -> ModuleType:
    """SGLang's own types of its JSON, which need nothing but msgspec."""
    pytest.importorskip("msgspec", reason="SGLang's schema needs msgspec")
    path = folder / "api_types.py"
    path.write_text(Source(Path(WHEEL)).text("api/v1/api_types.py"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sglang_api_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_wheel
def test_what_is_sent_passes_sglangs_own_schema(tmp_path: Path) -> None:
    schema = contract(tmp_path)
    bodies = [body for path, body in calls() if path == "/generate"]
    assert len(bodies) > 10
    for body in bodies:
        made = schema.GenerateRequest.from_json_value(body).to_json_value()
        # Nothing that was sent is lost or means its default.
        assert {name: made[name] for name in body if name != "sampling_params"} == {
            name: value for name, value in body.items() if name != "sampling_params"
        }
        params = made["sampling_params"]
        assert {name: params[name] for name in body["sampling_params"]} == body["sampling_params"]
    with pytest.raises(schema.JsonContractError):
        schema.GenerateRequest.from_json_value({"input_ids": "5 14"})
    with pytest.raises(schema.JsonContractError, match="max_tokens"):
        schema.GenerateRequest.from_json_value({"sampling_params": {"max_tokens": 1}})


@needs_wheel
def test_what_the_twin_replies_is_what_sglang_replies(tmp_path: Path) -> None:
    schema = contract(tmp_path)

    async def use(lab: Lab) -> list[Any]:
        await lab.load(the_model(3), 1)
        reply, seen = lab.twin.reply, list[Any]()

        async def recorded(method: str, path: str, body: Any) -> Any:
            found = await reply(method, path, body)
            seen.extend([found] if path == "/generate" else [])
            return found

        with patch.object(lab.twin, "reply", recorded):
            await lab.dialect.generate("a", (5, 6), SamplingParams(max_tokens=2, top_k=5))
            await lab.load(the_model(3), 1)
        return seen

    for one in with_twin(use):
        found = schema.GenerateResponse.from_json_value(one)
        assert list(found.output_ids) == one["output_ids"]
        meta = found.meta_info
        assert [entry.token_id for entry in meta.output_token_logprobs] == one["output_ids"]
        assert [(span.version, span.start) for span in meta.weight_versions] == [("1", 0)]
        assert type(meta.finish_reason).__name__ == "FinishLength"
