"""Plug-ins that tests name by reference, good ones and bad ones."""

from __future__ import annotations

import math

import torch


# Losses.
def smooth(policy_logprob_T, sampler_logprob_T, advantage_T, *, slope=1.0):
    return -advantage_T * torch.tanh(slope * (policy_logprob_T - sampler_logprob_T)) / slope


def by_segment(policy_logprob_T, segment_T, num_segments):
    assert int(segment_T.max()) < num_segments
    return -policy_logprob_T * segment_T


def raising(policy_logprob_T=None, reward_N=None, segment_T=None):
    raise ZeroDivisionError("by hand")


def mean_loss(policy_logprob_T):
    return policy_logprob_T.mean()


def number(policy_logprob_T=None, reward_N=None, segment_T=None):
    return 1.0


def whole_numbers(policy_logprob_T=None, reward_N=None):
    return torch.ones(len(policy_logprob_T if reward_N is None else reward_N), dtype=torch.long)


def without_gradient(policy_logprob_T):
    return policy_logprob_T.detach() * 2


def not_a_number(policy_logprob_T):
    return policy_logprob_T * torch.tensor([1.0] + [math.nan] * (len(policy_logprob_T) - 1))


def foreign_name(policy_logprob_T, ratio_T):
    return policy_logprob_T * ratio_T


def positional(policy_logprob_T, /):
    return policy_logprob_T


def without_inputs():
    return None


async def waiting(policy_logprob_T):
    return policy_logprob_T


# Advantages.
def median(reward_N, group_N, num_groups):
    median_G = torch.stack([reward_N[group_N == group].median() for group in range(num_groups)])
    return reward_N - median_G[group_N]


def later(reward_N, trajectory_T, length_N, **others):
    """More for later tokens."""
    place_T = torch.cat([torch.arange(int(length)) for length in length_N])
    reward_N *= 1.0  # a copy, which may be written to
    return reward_N[trajectory_T] * place_T


def with_graph(reward_N):
    return reward_N * torch.ones((), dtype=torch.float64, requires_grad=True)


def divided(reward_N):
    return reward_N / 0.0 - 1.0


def too_few(reward_N):
    return reward_N[1:]


# Corrections.
def halved(proximal_logprob_T, sampler_logprob_T, *, floor=0.5):
    """Half the weight where the policy has gone down, and never below a floor."""
    ratio_T = (proximal_logprob_T - sampler_logprob_T).exp()
    proximal_logprob_T *= 0.0  # a copy, which may be written to
    return torch.where(ratio_T < 1.0, 0.5 * ratio_T, ratio_T).clamp(min=floor)


def by_answer(segment_T, num_segments):
    return 1.0 - segment_T / num_segments


def learned(sampler_logprob_T):
    return sampler_logprob_T * torch.ones((), requires_grad=True)


def logarithm(sampler_logprob_T):
    return sampler_logprob_T.log()


# Group filters.
def short(lengths, rewards):
    return max(lengths) < 3 and len(rewards) > 1


def maybe(rewards):
    return 1


# Optimizers.
def sgd(groups, *, momentum=0.5):
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum)


def half(groups):
    return torch.optim.SGD(groups[:1], lr=0.0)


def no_optimizer(groups):
    return groups


def failing(groups):
    raise KeyError("lr")


class FailingStep(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("by hand")


def failing_step(groups):
    return FailingStep(groups, lr=0.0)


class Exploding(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.fill_(math.inf)


def exploding(groups):
    return Exploding(groups, lr=0.0)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["count"] = 1


def counting(groups):
    return Counting(groups, lr=0.0)


# Loggers.
class Lines:
    def __init__(self, folder, settings):
        self.steps = settings["steps"]
        self.file = (folder / "lines.txt").open("a", encoding="utf-8")

    def write(self, record):
        self.file.write(f"{record['stage']} {record['step']} of {self.steps}\n")

    def close(self):
        self.file.close()


class WriteOnly:
    def write(self, record):
        raise OSError("the disk is full")


class Full(WriteOnly):
    def close(self):
        return None


# Callbacks.
class Stops:
    """Ends a run after its second batch."""

    def after_step(self, run, metrics):
        return "stop" if metrics["stage"] == "reinforcement" and run.step == 2 else None


class Notes:
    seen: list = []

    def on_start(self, run):
        self.seen.append(("start", run.stage, run.step, run.steps))

    def after_batch(self, groups):
        self.seen.append(("batch", len(groups)))

    def after_evaluation(self, run, metrics):
        self.seen.append(("evaluation", metrics["accuracy"]))

    def on_end(self, status):
        self.seen.append(("end", status))


class FixedNorms:
    """Keeps the weights of norms, counts optimizer steps over resumes, and records what it gets."""

    seen: list = []

    def on_start(self, folder):
        self.count = 0 if folder is None else int((folder / "count.txt").read_text())

    def after_advantages(self, run, batch):
        self.seen.append(("advantages", run.step, float(batch.advantage_T.abs().max())))
        batch.advantage_T.zero_()  # a copy

    def before_optimizer_step(self, model, batch):
        self.count += 1
        self.seen.append(("optimizer step", self.count, batch.num_segments))
        for name, weight in model.named_parameters():
            if "norm" in name and weight.grad is not None:
                weight.grad.zero_()

    def after_weight_update(self, run, version):
        self.seen.append(("weight update", run.stage, version))

    def before_checkpoint(self, folder):
        (folder / "count.txt").write_text(str(self.count))


class Fails:
    """Raises at one point, if that is set."""

    point = ""

    def _reach(self, point):
        if point == self.point:
            raise LookupError(point)

    def on_start(self):
        self._reach("on_start")

    def after_batch(self, groups):
        self._reach("after_batch")

    def after_advantages(self, batch):
        self._reach("after_advantages")

    def before_optimizer_step(self, run, model):
        if run.step:
            self._reach("before_optimizer_step")

    def after_weight_update(self, version):
        self._reach("after_weight_update")

    def after_step(self, metrics):
        self._reach("after_step")

    def after_evaluation(self, metrics):
        self._reach("after_evaluation")

    def before_checkpoint(self, run):
        if run.step == 4:
            self._reach("before_checkpoint")


class Misspelt:
    def after_steps(self, run):
        return None


class Nothing:
    pass


class WrongInput:
    def after_step(self, reward):
        return None


class Talks:
    def after_batch(self, run):
        return "stop"

    def after_step(self, run):
        raise KeyError("reward/max")


# Rows.
def sums():
    for a in range(4):
        for b in range(5):
            yield {"question": f"{a}+{b}=", "answer": str(a + b)}


def no_rows():
    return 3


def lists():
    return [[1, 2]]


def breaking():
    yield {"question": "1+1="}
    raise ValueError("the server is gone")
