"""Operations that an optimizer step executes, beside those that its sequences need.

Counted are all matrix products, by `torch.utils.flop_counter`, with torch's attention made of plain
ones (SDPBackend.MATH): for the kernels that a CPU has otherwise it counts nothing. So counted,
attention is the whole rectangle of a sequence, on every side: that is how "useful" is meant here.

- limit: every sequence alone, once forward and once backward, with the head at the positions that
  predict a response token: transformers' model, no padding. Nothing useful can be less.
- ours: the passes for old log-probabilities, where the recipe needs them, and the step, on packed
  microbatches. A head that keeps no logits runs its product once more in the backward: that counts
  as executed.
- trl: from the completions to the gradient, `_generate_and_score_completions` to `training_step`.

All take the same completions, rewards and log-probabilities of an engine to the same gradient, with
the correction for the mismatch of engine and trainer that is TRL's default beside vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.ranks.measure import counted_flops
from helpers.models.tiny import PAD_ID, tiny_model
from helpers.oracle.policies import gradient_boxes, start_policy, tiny_config
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.distribute import split_for_data_parallel
from megatron_grpo.batch.experience import compute_advantages as experience_of
from megatron_grpo.batch.prepare import add_logprobs
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel

NUM_PROMPTS, NUM_GENERATIONS = 8, 4
NUM_SAMPLES = NUM_PROMPTS * NUM_GENERATIONS
PROMPT_LENGTHS, LONGEST = (24, 96), 384
SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 256,  # the head has 2% of the weights, as in a model of 32B
}
IS_MODE, IS_MOST = "sequence_mask", 3.0
"""TRL's defaults for `vllm_importance_sampling_mode` and `_clip_max`."""
FLOPS, EXCESS = "flops", "executed over useful"

ROUNDS = 1
"""Nothing but counts, which are exact."""
TITLE = (
    f"FLOPs of one optimizer step: {NUM_SAMPLES} completions of {NUM_PROMPTS} prompts, lognormal "
    f"lengths up to {LONGEST}, a Qwen3 whose head has 2% of the weights"
)
REQUIREMENTS: dict[str, list[str]] = {"trl": [], "limit": []}
SETTINGS = {
    "limit": "each sequence once through transformers' model, the head at response positions only",
    "trl": (
        f"{version('trl')} as in the project's environment, without gradient checkpointing (its "
        "default would be one more forward); `_generate` returns the completions, and "
        "`_use_triton` says yes, so that as on a GPU its head sees response positions only"
    ),
}


@dataclass(frozen=True)
class Inputs:
    """What all sides start from."""

    model: Path
    samples: list[Sample]
    rewards: list[float]


def inputs(folder: Path) -> Inputs:
    """A random model, completions of random tokens, and what an engine near the model says."""
    model = tiny_model(folder / "model", "qwen3", tied=False, **SHAPE)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        drawn = torch.randint(4, SHAPE["vocab_size"], (count,), generator=generator)
        return tuple(drawn.tolist())

    lengths = (4.0 + torch.randn(NUM_SAMPLES, generator=generator)).exp().int().clamp(8, LONGEST)
    rewards = torch.rand(NUM_SAMPLES, generator=generator).tolist()
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples = []
    for i, length in enumerate(lengths.tolist()):
        if i % NUM_GENERATIONS == 0:
            size = int(torch.randint(*PROMPT_LENGTHS, (1,), generator=generator))
            prompt = Prompt(index=i, token_ids=tokens(size), text=f"{i}", row={})
        completion = tokens(length)
        with torch.no_grad():
            exact = _logprobs(trained, prompt.token_ids, completion)
        noise = 1e-3 * torch.randn(length, generator=generator)
        samples.append(
            Sample(
                prompt=prompt,
                sample_index=i % NUM_GENERATIONS,
                completion_ids=completion,
                logprobs=tuple((exact + noise).tolist()),
                finish_reason="stop",
                text="",
                policy_version=0,
                loss_mask=(True,) * length,
            )
        )
    return Inputs(model, samples, rewards)


def ours(folder: Path) -> dict[str, float]:
    """The FLOPs of `add_logprobs` and `train_step`, on one rank."""
    given = inputs(folder)
    overrides = [
        f"grpo.num_generations={NUM_GENERATIONS}",
        f"grpo.generation_batch_size={NUM_SAMPLES}",
        "grpo.beta=0.0",
        "grpo.loss_type=dapo",
        f"grpo.rollout_importance_sampling_mode={IS_MODE}",
        f"grpo.rollout_importance_sampling_threshold={IS_MOST}",
        f"rollout.max_completion_length={LONGEST}",
        "train.max_tokens_per_microbatch=1024",
        "optimizer.max_grad_norm=1e9",
    ]
    dims = ParallelDims()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy, groups = start_policy(0, given.model, dims, *overrides)
    cfg = tiny_config(given.model, dims, *overrides)
    [term] = cfg.reward_terms
    rewards = [{term.label: r} for r in given.rewards]
    experience = experience_of(given.samples, rewards, given.rewards, cfg)
    cost = CostModel.transformer(SHAPE["hidden_size"])
    [[share]] = split_for_data_parallel(experience, 0, cost, cfg, dims, Alignment())
    minibatch = share.pack(Alignment(), share_prompts=False)

    def step() -> float:
        batches = add_logprobs(minibatch, policy, None, cfg, groups, is_next=True)
        report = train_step(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), SkippedSteps(1, 0), 0.0)
        return report.metrics["loss"]

    loss, flops = count(step)
    whole = load_file(given.model / "model.safetensors")
    gradient = {name: torch.zeros_like(weight) for name, weight in whole.items()}
    for name, box, values in gradient_boxes(policy):
        part = gradient[name][box.slices]
        part.copy_(values.reshape(part.shape))
    return leave(folder, given, loss, gradient, flops)


def limit(folder: Path) -> dict[str, float]:
    """The FLOPs of the sequences, each by itself."""
    given = inputs(folder)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    [term] = tiny_config(given.model, ParallelDims()).reward_terms
    grpo = [f"grpo.num_generations={NUM_GENERATIONS}", f"grpo.generation_batch_size={NUM_SAMPLES}"]
    cfg = tiny_config(given.model, ParallelDims(), *grpo)
    advantages = experience_of(
        given.samples, [{term.label: r} for r in given.rewards], given.rewards, cfg
    ).advantages.tolist()
    num_tokens = sum(len(sample.completion_ids) for sample in given.samples)

    def step() -> float:
        total = 0.0
        for sample, advantage in zip(given.samples, advantages, strict=True):
            logprobs = _logprobs(model, sample.prompt.token_ids, sample.completion_ids)
            present = logprobs.detach()
            weight = (present - torch.tensor(sample.logprobs)).sum().exp()
            assert weight <= IS_MOST, "no sequence is to be masked"
            loss = -(weight * advantage * (logprobs - present).exp()).sum() / num_tokens
            loss.backward()
            total += loss.item()
        return total

    loss, flops = count(step)
    return leave(folder, given, loss, _gradient(model), flops)


def trl(folder: Path) -> dict[str, float]:
    """The FLOPs of TRL's own trainer from the completions on."""
    import trl.trainer.utils
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = inputs(folder)
    trl.trainer.utils._use_triton = lambda device: True
    prompts = [sample.prompt.text for sample in given.samples[::NUM_GENERATIONS]]
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=NUM_SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=NUM_GENERATIONS,
        max_completion_length=LONGEST,
        beta=0.0,
        loss_type="dapo",
        max_grad_norm=0.0,
    )
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1  # which its loop over batches sets
    assert args.vllm_importance_sampling_mode == IS_MODE
    assert args.vllm_importance_sampling_clip_max == IS_MOST
    generated = (
        [list(sample.prompt.token_ids) for sample in given.samples],
        [list(sample.completion_ids) for sample in given.samples],
        None,
        [""] * NUM_SAMPLES,
        [list(sample.logprobs) for sample in given.samples],
        {},
        None,
        None,
    )
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *_: torch.tensor(given.rewards)[:, None]
    model.train()
    rows = [{"prompt": sample.prompt.text} for sample in given.samples]

    def step() -> float:
        return float(trainer.training_step(model, rows, torch.tensor(1)))

    loss, flops = count(step)
    return leave(folder, given, loss, _gradient(model), flops)


SIDES: dict[str, Callable[[Path], dict[str, float]]] = {"ours": ours, "limit": limit, "trl": trl}
GOALS = [(FLOPS, "limit", 1 / 1.02), (FLOPS, "trl", 2.0)]


def compare(ours: Path, peer: Path) -> str:
    """Loss and every gradient agree; the largest error of a gradient, relative to its largest."""
    mine, theirs = (load_file(folder / "gradient.safetensors") for folder in (ours, peer))
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    worst = max(
        float((mine[name] - values).abs().max() / values.abs().max())
        for name, values in theirs.items()
    )
    assert worst < 1e-4, f"gradients differ by {worst:.1e} of the largest element"
    return f"every gradient within {worst:.0e} of its largest element (float32)"


def count(step: Callable[[], float]) -> tuple[float, int]:
    """What the step returns, and the operations of all its matrix products."""
    with counted_flops() as counter:
        returned = step()
    return returned, counter.get_total_flops()


def useful_flops(given: Inputs) -> int:
    """Operations by formula: three forwards, with attention to all keys, future ones included."""
    shape = SHAPE
    heads = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    attention = shape["hidden_size"] * (2 * heads + 2 * keys)
    layer = attention + 3 * shape["hidden_size"] * shape["intermediate_size"]
    forward = 0
    for sample in given.samples:
        length = len(sample.prompt.token_ids) + len(sample.completion_ids)
        forward += shape["num_hidden_layers"] * (2 * layer * length + 4 * heads * length**2)
        forward += 2 * shape["hidden_size"] * shape["vocab_size"] * len(sample.completion_ids)
    return 3 * forward


def leave(
    folder: Path, given: Inputs, loss: float, gradient: dict[str, Tensor], flops: int
) -> dict[str, float]:
    """Write what is compared; the figures."""
    named = {name: values.float().contiguous() for name, values in gradient.items()}
    save_file(named, folder / "gradient.safetensors")
    return {FLOPS: float(flops), EXCESS: flops / useful_flops(given), "loss": loss}


def _logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Log-probabilities of the completion [n]; the head runs only at the n positions that predict
    it."""
    tokens = torch.tensor([[*prompt, *completion]])
    assert not (tokens == PAD_ID).any()
    hidden = model.model(tokens, use_cache=False).last_hidden_state[0]
    logits = model.lm_head(hidden[len(prompt) - 1 : -1])
    return torch.log_softmax(logits, -1).gather(1, torch.tensor([*completion])[:, None])[:, 0]


def _gradient(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
