"""Advantages, loss and gradient equal those of TRL's own code on the same tensors, in float64.

TRL 1.16.0 runs `GRPOTrainer._generate_and_score_completions` for advantages, old and reference
log-probabilities and weights of trainer over engine, and `GRPOTrainer._compute_loss`, with a real
`GRPOConfig` and a real `Accelerator`. Stand-ins:

- the trainer is made without its `__init__`, which wants a model of the hub and a data set, and
  gets the attributes that the two methods read;
- the models are `BigramModel`s behind the interface of TRL's patched forward, which returns
  log-probabilities and entropies;
- `_generate` returns fixed completions with the log-probabilities of a fourth such model, as an
  engine; `_calculate_rewards` returns fixed scores, which the real one would round to float32.
"""

from collections import defaultdict, deque
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.oracle.losses import BigramModel, chosen_tokens
from megatron_grpo.algorithm.advantages import group_advantages, normalized_sum_advantages
from megatron_grpo.algorithm.loss import LossTokens, grpo_loss, loss_weights
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.token_values import keep_high_entropy, with_entropy_weights
from megatron_grpo.config.grpo import GRPOConfig
from parallel.alignment import Alignment
from parallel.packing import TokenSequence, pack

PROMPT_LENGTHS = [2, 6, 1, 4, 3, 5, 1, 2]
COMPLETION_LENGTHS = [5, 1, 9, 4, 3, 7, 2, 1]
MAX_COMPLETION_LENGTH = 9
NUM_GENERATIONS = 4
SCORES = [[0.25, 1], [-1.25, 0], [1, 0.5], [2, 0], [-0.5, 0.75], [0, 0.5], [-2, 1], [0.5, 1]]
WEIGHTS = [1.0, 0.5]


class Patched(nn.Module):
    """A bigram model with the interface of a model patched by TRL."""

    is_gradient_checkpointing = False

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels, fused_lm_head):
        rows = [self.model.of_response(tokens, 1) for tokens in input_ids]
        logprobs, entropy = (
            torch.stack([nn.functional.pad(of, (1, 0)) for of in column])
            for column in zip(*rows, strict=True)
        )
        return SimpleNamespace(log_probs=logprobs, entropy=entropy)


class Case:
    """Eight completions of two prompts, and the policies that compute them."""

    def __init__(self):
        self.policy, self.old, self.reference = (BigramModel(seed) for seed in (1, 2, 3))
        self.engine = BigramModel(4)
        with torch.no_grad():  # policies are close: weights lie on both sides of their bounds
            self.old.table.copy_(self.policy.table + 0.3 * self.old.table)
            self.engine.table.copy_(self.old.table + 0.1 * self.engine.table)
        generator = torch.Generator().manual_seed(0)
        self.tokens = [
            torch.randint(11, (p + c,), generator=generator)
            for p, c in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
        ]
        self.rollout = [
            self.engine.of_response(tokens, p)[0].detach()
            for tokens, p in zip(self.tokens, PROMPT_LENGTHS, strict=True)
        ]


def trl_trainer(case, folder, options):
    # Imported here: at the top, collecting these tests would import vLLM.
    from accelerate import Accelerator
    from trl import GRPOConfig as TRLConfig
    from trl import GRPOTrainer

    args = TRLConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(case.tokens),
        num_generations=NUM_GENERATIONS,
        num_iterations=2,  # with 1 the old policy would be the current one
        max_completion_length=MAX_COMPLETION_LENGTH,
        reward_weights=WEIGHTS,
        **options,
    )
    trainer = object.__new__(GRPOTrainer)
    corrects = "vllm_importance_sampling_mode" in options
    prompts, completions = (
        [tokens[part].tolist() for tokens, part in zip(case.tokens, parts, strict=True)]
        for parts in (
            [slice(0, p) for p in PROMPT_LENGTHS],
            [slice(p, None) for p in PROMPT_LENGTHS],
        )
    )
    rollout = [logprobs.tolist() for logprobs in case.rollout]
    generated = (prompts, completions, None, [""] * 8, rollout, {}, None, None)
    attributes = {
        "args": args,
        "accelerator": Accelerator(cpu=True),
        "state": SimpleNamespace(global_step=0),
        "model": Patched(case.old),
        "ref_model": Patched(case.reference),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *_: torch.tensor(SCORES),
        "use_vllm": corrects,
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_mode": args.vllm_importance_sampling_mode,
        "vllm_importance_sampling_clip_min": args.vllm_importance_sampling_clip_min,
        "vllm_importance_sampling_clip_max": args.vllm_importance_sampling_clip_max,
        "reward_weights": torch.tensor(WEIGHTS),
        "reward_funcs": [None, None],
        "reward_func_names": ["first", "second"],
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "_entropy_bonus_enabled": args.entropy_coef != 0,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "log_multimodal": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: deque()) | {"rewards": defaultdict(deque)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    same = (
        "beta",
        "loss_type",
        "importance_sampling_level",
        "scale_rewards",
        "multi_objective_aggregation",
        "num_generations",
        "num_iterations",
        "max_completion_length",
        "mask_truncated_completions",
        "top_entropy_quantile",
        "entropy_coef",
        "use_adaptive_entropy",
        "off_policy_mask_threshold",
    )
    for name, value in (attributes | {name: getattr(args, name) for name in same}).items():
        setattr(trainer, name, value)
    return trainer


def trl_values(case, folder, options):
    """Advantages, loss and its gradient by the bigram table, by TRL's code."""
    torch.set_default_dtype(torch.float64)
    try:
        trainer = trl_trainer(case, folder, options)
        batch = trainer._generate_and_score_completions([{"prompt": ""} for _ in case.tokens])
        trainer.model = Patched(case.policy)
        loss = trainer._compute_loss(trainer.model, batch)
    finally:
        torch.set_default_dtype(torch.float32)
    (gradient,) = torch.autograd.grad(loss, case.policy.table)
    return batch["advantages"], loss.detach(), gradient


def our_values(case, options, one_rank):
    """Advantages, loss and its gradient by the bigram table, by our code."""
    cfg = GRPOConfig(generation_batch_size=8, num_generations=NUM_GENERATIONS, **options)
    scores, weights = torch.tensor(SCORES).double(), torch.tensor(WEIGHTS).double()
    ids = torch.arange(8) // NUM_GENERATIONS
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        advantages = normalized_sum_advantages(scores, weights, ids)
    else:
        advantages = group_advantages(scores @ weights, ids, cfg.scale_rewards)
    of_tokens = loss_weights(
        torch.tensor(COMPLETION_LENGTHS), cfg.aggregation, MAX_COMPLETION_LENGTH
    )
    sequences = [
        TokenSequence(
            tokens=tokens,
            num_prompt_tokens=p,
            advantage=float(advantage),
            loss_weight=float(weight),
            rollout_logprobs=rollout,
        )
        for tokens, p, advantage, weight, rollout in zip(
            case.tokens, PROMPT_LENGTHS, advantages, of_tokens, case.rollout, strict=True
        )
    ]
    batch = pack(sequences, range(8), Alignment(), dtype=torch.float64)
    logprobs, entropy = case.policy.of_packed(batch)
    batch = replace(
        batch,
        old_logprobs=case.old.of_packed(batch)[0].detach(),
        ref_logprobs=case.reference.of_packed(batch)[0].detach() if cfg.beta else None,
    )
    if cfg.top_entropy_quantile < 1:
        [batch] = keep_high_entropy([batch], [entropy.detach()], cfg.top_entropy_quantile, one_rank)
    if cfg.entropy_coef:
        [batch] = with_entropy_weights([batch], one_rank)
    chosen = chosen_tokens(batch.loss_mask, logprobs, entropy)
    loss = grpo_loss(LossTokens.select(batch, chosen), cfg, LossFunction.of(cfg), cfg.beta)
    (gradient,) = torch.autograd.grad(loss.total, case.policy.table)
    return advantages, loss.total.detach(), gradient


OURS = {"loss_type": "grpo", "use_bias_correction_kl": False}
"""Defaults of the cases, for both trainers."""
CLIPS = {"epsilon": 0.1, "epsilon_high": 0.15}
CLIPS_OF = {"cispo": {"epsilon_high": 1.15}, "sapo": {}, "vespo": {}}
"""Clip options of the loss types that do not take the usual ones."""
BOTH = {
    f"{loss_type}, {level}": {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        **CLIPS_OF.get(loss_type, CLIPS),
        "beta": beta,
        "scale_rewards": scale,
    }
    for loss_type, level, beta, scale in [
        ("grpo", "token", 0.0, "group"),
        ("grpo", "sequence", 0.3, "batch"),
        ("dapo", "token", 0.3, "none"),
        ("bnpo", "token", 0.3, "group"),
        ("dr_grpo", "token", 0.3, "none"),
        ("cispo", "token", 0.3, "group"),
        ("sapo", "token", 0.3, "group"),
        ("luspo", "sequence", 0.3, "group"),
        ("vespo", "token", 0.3, "group"),
    ]
} | {
    "dual clip": {**CLIPS, "delta": 1.25},
    "unbiased kl": {**CLIPS, "beta": 0.3, "use_bias_correction_kl": True},
    "forking tokens": {**CLIPS, "beta": 0.3, "top_entropy_quantile": 0.3},
    "entropy bonus": {**CLIPS, "entropy_coef": 0.2},
    "off-policy mask": {**CLIPS, "beta": 0.3, "off_policy_mask_threshold": 0.05},
    "temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "gammas": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 0.5,
        "vespo_k_neg": 0.25,  # TRL rounds these to float32
        "vespo_lambda_neg": 0.75,
    },
    "rewards normalized each for itself": {
        **CLIPS,
        "multi_objective_aggregation": "normalize_then_sum",
    },
}
MODES = [
    (loss_type, mode)
    for loss_type in ("grpo", "cispo", "vespo")
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    if loss_type != "vespo" or mode.startswith("token")
]


def assert_equal(case, folder, of_ours_options, of_trl_options, one_rank):
    advantages, loss, gradient = our_values(case, of_ours_options, one_rank)
    expected_advantages, expected_loss, expected_gradient = trl_values(case, folder, of_trl_options)
    torch.testing.assert_close(advantages, expected_advantages, rtol=1e-12, atol=1e-12)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-10, abs=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)
    assert gradient.any()


def test_options_with_trls_names_have_its_defaults_but_for_one():
    from trl import GRPOConfig as TRLConfig

    theirs = {field.name: field.default for field in fields(TRLConfig)}
    ours = GRPOConfig(generation_batch_size=8).model_dump()
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    derived = {name for name in differ if theirs[name] is None}  # TRL derives them from others
    assert derived == {"generation_batch_size", "steps_per_generation", "epsilon_high"}
    assert differ - derived == {"use_bias_correction_kl"}  # see docs/coming-from.md


@pytest.mark.parametrize("name", BOTH)
def test_loss_and_gradient_are_those_of_trl(name, tmp_path, one_rank):
    options = OURS | BOTH[name]
    assert_equal(Case(), tmp_path, options, options, one_rank)


@pytest.mark.parametrize("loss_type, mode", MODES)
def test_weights_of_trainer_over_engine_are_those_of_trl(loss_type, mode, tmp_path, one_rank):
    common = OURS | {"loss_type": loss_type, "beta": 0.3, **CLIPS_OF.get(loss_type, CLIPS)}
    assert_equal(
        Case(),
        tmp_path,
        common
        | {
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": 1.125,
            "rollout_importance_sampling_min": 0.9375,
        },
        common
        | {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.125,
            "vllm_importance_sampling_clip_min": 0.9375,
        },
        one_rank,
    )
