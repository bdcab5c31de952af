"""What a process of a test would import and load each time; imported once, by the server that forks them."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress

# Before torch is imported: autograd starts threads for each GPU, and with them a process cannot be forked.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

for name in (
    "millrace.run.loop",
    "millrace.engines.engine_worker",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "pytest",
    "tests.end_to_end.runs",
    "tests.ranks",
    "torch.distributed.fsdp",
    "transformers.convert_slow_tokenizer",
    "transformers.integrations.mistral",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
):
    importlib.import_module(name)

kernels = importlib.import_module("millrace.kernels.warm")
with suppress(kernels.KernelsNotKeptError):
    list(kernels.warm(num_workers=1))

importlib.import_module("millrace.observability.report_page").template()

# Otherwise the first collection in each process copies most of the server's memory.
gc.collect()
gc.freeze()
