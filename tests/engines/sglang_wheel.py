"""What a wheel of SGLang says about its HTTP interface, read from its source without running it.

`python tests/engines/sglang_wheel.py WHEEL` writes `sglang_facts.json`.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("sglang_facts.json")
VERBS = (
    "/abort_request",
    "/continue_generation",
    "/detokenize",
    "/generate",
    "/health",
    "/model_info",
    "/pause_generation",
    "/update_weights_from_disk",
    "/v1/models",
    "/weights_checker",
)
OPTIONS = (
    "api_key",
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "disable_cuda_graph",
    "dtype",
    "enable_deterministic_inference",
    "enable_metrics",
    "host",
    "load_format",
    "log_level",
    "max_running_requests",
    "model_path",
    "port",
    "sampling_mask_max_tokens",
    "served_model_name",
)
# Texts in the source, by file: keys of replies, and values that are sent or looked for.
TEXTS = {
    "managers/tokenizer_manager.py": (
        "cached_tokens",
        "finish_reason",
        "input_token_logprobs",
        "meta_info",
        "output_ids",
        "output_token_logprobs",
        "output_token_sampling_logprobs",
        "output_token_sampling_mask",
        "weight_version",
    ),
    "utils/weight_versions.py": ("version", "start", "end", "weight_versions"),
    "utils/weight_checker.py": ("checksum",),
    "entrypoints/http_server.py": ("ranks", "success", "weight_version"),
    "managers/schedule_batch.py": ("abort", "length", "matched", "stop", "type"),
    "managers/scheduler.py": ("The request queue is full.",),
    "observability/metrics_collector.py": ("sglang:num_requests_total", "sglang:realtime_tokens_total"),
    "configs/load_config.py": ("dummy", "safetensors"),
    "server_args.py": ("--config",),
}
ENVIRONMENT = ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_RETURN_ORIGINAL_LOGPROB")


class Source:
    """The files of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)

    @property
    def version(self) -> str:
        (about,) = (name for name in self._archive.namelist() if name.endswith("dist-info/METADATA"))
        lines = self._archive.read(about).decode().splitlines()
        return next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))

    def text(self, path: str) -> str:
        return self._archive.read(f"sglang/{path}").decode()

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.text(path))

    def below(self, folder: str) -> list[str]:
        found = [name.removeprefix("sglang/") for name in self._archive.namelist()]
        return [name for name in found if name.startswith(folder) and name.endswith(".py")]


def facts_of(wheel: Path) -> dict[str, Any]:
    """The names that the dialect relies on; KeyError names one that the wheel has not."""
    source = Source(wheel)
    classes = {
        node.name: node
        for path in ("srt/managers/io_struct.py", "srt/entrypoints/openai/protocol.py")
        for node in source.tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    routes = dict(_routes(source.tree("srt/entrypoints/http_server.py")))
    verbs = {
        path: {"methods": sorted(methods), "fields": sorted(_fields(body, classes)) if body else []}
        for path in VERBS
        for methods, body in [routes[path]]
    }
    contract = {
        node.name: node for node in source.tree("api/v1/api_types.py").body if isinstance(node, ast.ClassDef)
    }
    (modes,) = (
        node.annotation
        for node in classes["PauseGenerationReqInput"].body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "mode"
    )
    return {
        "version": source.version,
        "verbs": verbs,
        "generate_contract": sorted(_fields("GenerateRequest", contract)),
        "sampling_params": sorted(_fields("SamplingParams", contract)),
        "pause_modes": sorted(node.value for node in ast.walk(modes) if isinstance(node, ast.Constant)),
        "options": _present(OPTIONS, _options(source)),
        "texts": {path: _present(words, _texts(source, f"srt/{path}")) for path, words in TEXTS.items()},
        "environment": _present(ENVIRONMENT, _names(source.tree("srt/environ.py"))),
    }


def _present(wanted: tuple[str, ...], there: set[str]) -> list[str]:
    for one in wanted:
        if one not in there:
            raise KeyError(one)
    return sorted(wanted)


def _routes(tree: ast.Module) -> Iterator[tuple[str, tuple[set[str], str]]]:
    """Each path with its methods, and the class of its body."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        bodies = [ast.unparse(one.annotation) for one in function.args.args if one.annotation is not None]
        names = [
            word
            for text in bodies
            for word in text.replace("[", " ").replace("]", " ").replace(",", " ").split()
        ]
        body = next((name for name in names if name.endswith(("ReqInput", "AbortReq", "izeRequest"))), "")
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("app.") and call.args:
                methods = {ast.unparse(call.func).removeprefix("app.").upper()}
                if methods == {"API_ROUTE"}:
                    (listed,) = (one.value for one in call.keywords if one.arg == "methods")
                    methods = set(ast.literal_eval(listed))
                if isinstance(call.args[0], ast.Constant):
                    yield call.args[0].value, (methods, body)


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    found = {ast.unparse(node.target) for node in classes[name].body if isinstance(node, ast.AnnAssign)}
    for base in classes[name].bases:
        if ast.unparse(base) in classes:
            found |= _fields(ast.unparse(base), classes)
    return found


def _options(source: Source) -> set[str]:
    return {name for path in source.below("srt/arg_groups/fields/") for name in _names(source.tree(path))}


def _names(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _texts(source: Source, path: str) -> set[str]:
    return {
        node.value
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


if __name__ == "__main__":
    FACTS.write_text(json.dumps(facts_of(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
