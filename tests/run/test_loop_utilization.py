"""What a batch reached of its devices' peak is what can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from millrace import train
from millrace.run import loop
from millrace.run.loop import reached
from millrace.training.policy import PolicyTrainer
from millrace.training.value import ValueTrainer
from tests.close import close_fp64
from tests.end_to_end.tiny import metrics_of, tiny_recipe


def run(folder, **overrides):
    return train(tiny_recipe(folder, {"sft": None, **overrides}), quiet=True).run


@pytest.mark.parametrize(("name", "mfu"), [("NVIDIA H200", 3e15 / 4 / 2 / 989e12), ("Another", None)])
def test_a_device_is_known_by_its_drivers_name(monkeypatch, name, mfu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    found = reached(3 * 10**15, 2.0, num_ranks=4, device=device, dtype="bfloat16")
    close_fp64(found.pop("time/tflops_per_rank"), 375.0)
    assert list(found) == ([] if mfu is None else ["time/mfu"])
    close_fp64(list(found.values()), [] if mfu is None else [mfu])


def operations(model, batch, *, head: bool) -> int:
    """Of a forward and a backward, by the weights: products of each token, pairs it sees, chosen ones."""
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "_proj." in name)
    text = model.config
    pairs = sum(length * (length + 1) // 2 for length in batch.length_B.tolist())
    scores = 4 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * pairs
    predicted = int(batch.action_mask_T.sum()) * text.vocab_size * text.hidden_size if head else 0
    return 3 * (2 * weights * batch.num_tokens + scores + 2 * predicted)


@pytest.mark.slow
@pytest.mark.world
def test_utilization_is_what_a_batch_took_of_the_peak(tmp_path, monkeypatch):
    asked, taken = [], []

    def counted(trainer, head):
        real = trainer.forward_backward

        def forward_backward(self, batch):
            taken.append(operations(self.model, batch, head=head))
            return real(self, batch)

        monkeypatch.setattr(trainer, "forward_backward", forward_backward)

    counted(PolicyTrainer, True)
    counted(ValueTrainer, False)
    monkeypatch.setattr(loop, "peak_flops", lambda *named: asked.append(named) or 2e9)
    critic = {"advantage.kind": "gae", "critic": {"warmup_steps": 1}}
    critic["rewards"] = [{"kind": "format", "pattern": "(?s).*[a-z].*"}]
    batches = [record for record in metrics_of(run(tmp_path, **critic)) if record["stage"] == "reinforcement"]
    # The critic alone in the first batch, then the critic and the policy.
    expected = [taken[0], *(sum(taken[at : at + 2]) for at in range(1, len(taken), 2))]
    assert len(batches) == 4 and len(taken) == 7 and min(taken) > 0
    seconds = [record["time/train_s"] for record in batches]
    close_fp64([record["time/mfu"] * s * 2e9 for record, s in zip(batches, seconds, strict=True)], expected)
    done = [record["time/tflops_per_rank"] * 1e12 * s for record, s in zip(batches, seconds, strict=True)]
    close_fp64(done, expected)
    assert set(asked) == {("cpu", "float32")}


def test_operations_are_not_counted_where_not_every_weight_learns(tmp_path):
    records = metrics_of(run(tmp_path, **{"steps": 1, "model.frozen": ["*embed*"]}))
    assert [set(r) & {"time/tflops_per_rank", "time/mfu"} for r in records] == [set()] * len(records)
