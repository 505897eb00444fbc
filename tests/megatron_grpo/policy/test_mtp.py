"""The layer for multi-token prediction: its gradient is that of `transformers`' own layers at every
layout, and the policy's is to the bit that of a policy without it."""

import io
import json
import shutil
from contextlib import redirect_stderr
from functools import cache

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert import read_shape
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.models.conversions import assert_same, weights_of
from helpers.models.tiny import HYBRIDS, add_mtp_layer, tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.optimizers import state_of, wholes
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    gradient_boxes,
    layout_name,
    load_oracle,
    pack_all,
    random_sequences,
    tiny_config,
)
from helpers.oracle.train_steps import BUDGETS, Case, batches_of, config
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.forward import response_logprobs, run_schedule
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.optimizer import gradient_norm
from megatron_grpo.policy.router import with_own_layers
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from tests.megatron_grpo.policy.test_router import EXPERTS, LAYERS, TOPK, follow, random_routes

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", *HYBRIDS)
TEMPERATURE = 0.8
ON = ("model.mtp_num_layers=1", f"rollout.temperature={TEMPERATURE}", "optimizer.max_grad_norm=1e9")
MIXTURES = tuple(family for family in FAMILIES if family != "qwen3_5_text")
LAYOUTS = [
    (ParallelDims(tensor=2, expert_tensor=1, expert=2), MIXTURES),
    (ParallelDims(context=2, expert=2), ("deepseek_v3", "qwen3_next")),
    (ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2), ("glm4_moe", "qwen3_next")),
    (ParallelDims(tensor=2, pipeline=2), ("deepseek_v3", "qwen3_5_text")),
]
"""Layouts, and the models that show their faults; with all models they are slow cases."""
MORE_LAYOUTS = [
    *(ParallelDims(), ParallelDims(data=2), ParallelDims(pipeline=2)),
    *(ParallelDims(tensor=2, context=2), *(dims for dims, _ in LAYOUTS[1:])),
]


class Oracle:
    """Loss and gradients of the layer of the model in `folder`, in float64, sequence by sequence:
    DeepSeek-V3's equations 21 to 25 with the decoder layer of `transformers`."""

    def __init__(self, folder):
        self.folder, last = folder, read_shape(folder).num_layers
        behind = self.prefix = self.own_prefix = f"model.layers.{last}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        deeper = shutil.copytree(folder, folder.with_name("deeper"))
        config = json.loads((folder / "config.json").read_text())
        self.is_apart = config["model_type"] in HYBRIDS
        stored = load_file(folder / "model.safetensors")
        config["num_hidden_layers"] = last + 1
        config.pop("mlp_layer_types", None)
        if self.is_apart:
            self.prefix, self.own_prefix = "mtp.layers.0.", "mtp."
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            config["layer_types"].append("full_attention")
            renamed = {n.replace(self.prefix, behind): each for n, each in stored.items()}
            save_file(renamed, deeper / "model.safetensors", {"format": "pt"})
        (deeper / "config.json").write_text(json.dumps(config))
        self.model, self.deeper = load_oracle(folder), load_oracle(deeper)
        self.layer = self.deeper.model.layers[last]
        stored = [stored[f"{self.own_prefix}{name}.weight"].double() for name in names]
        self.own = dict(zip(names, (each.requires_grad_() for each in stored), strict=True))
        self.size, self.eps = (config["hidden_size"],), config["rms_norm_eps"]

    def norm(self, x, weight):
        return rms_norm(x, self.size, weight + 1 if self.is_apart else weight, self.eps)

    def logprobs(self, sequence):
        """Of the tokens of the response, but for one that is the second token of all."""
        with torch.no_grad():
            hidden = self.model.model(sequence.tokens[None]).last_hidden_state[:, :-1]
            embedded = self.model.model.embed_tokens(sequence.tokens[None, 1:])
        enorm, hnorm, eh_proj, last_norm = self.own.values()
        joined = torch.cat([self.norm(embedded, enorm), self.norm(hidden, hnorm)], dim=-1)
        joined = linear(joined, eh_proj)
        positions = torch.arange(joined.shape[1])[None]
        rotary = self.deeper.model.rotary_emb(joined, positions)
        output = self.layer(joined, position_embeddings=rotary, position_ids=positions)
        output = self.norm(output, last_norm)
        logits = self.model.lm_head.weight.detach() @ output[0].T / TEMPERATURE
        first = max(sequence.num_prompt_tokens, 2)
        targets = sequence.tokens[first:]
        return logits.log_softmax(0)[targets, torch.arange(first - 2, len(sequence.tokens) - 2)]

    def answer(self, lengths, routes=None):
        """`routes`: the experts of the model's tokens, by sequence; None: its routers choose."""
        logprobs = []
        for number, sequence in enumerate(random_sequences(lengths)):
            if routes is not None:
                self.model = load_oracle(self.folder)
                follow(self.model, routes[number : number + 1])
            logprobs.append(self.logprobs(sequence))
        logprobs = torch.cat(logprobs)
        loss = -logprobs.mean()
        loss.backward()
        of_layer = {n: p.grad for n, p in self.deeper.named_parameters() if p.grad is not None}
        behind = f"model.layers.{len(self.deeper.model.layers) - 1}."
        gradients = {
            name.replace(behind, self.prefix): gradient
            for name, gradient in revert_weight_conversion(self.deeper, of_layer).items()
            if behind in name
        }
        own = {f"{self.own_prefix}{name}.weight": each.grad for name, each in self.own.items()}
        return float(loss.detach()), gradients | own


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family) / "model"
        options = {"rms_norm_eps": 1e-6} if family == "glm4_moe_lite" else {}
        made[family] = add_mtp_layer(
            tiny_model(folder, family, num_hidden_layers=4, **options), norm=1.0
        )
    return made


@pytest.fixture(scope="module")
def answers(folders):
    return {family: Oracle(folder).answer(LENGTHS) for family, folder in folders.items()}


def gradients_on_rank(rank, folders, dims, *overrides, routes=None):
    """For each model: metrics, and boxes of the gradient of all that is trained."""
    setup_device(rank)
    groups = init_groups(dims)
    share = pack_all(LENGTHS, dims, routes)[groups.coordinates.data :: dims.data]
    share = [with_own_layers(batch, groups) for batch in share]
    found = {}
    for family, folder in folders.items():
        cfg = tiny_config(folder, dims, *overrides)
        policy = build_policy(cfg, trained_shape(cfg), groups)

        def loss_fn(hidden, batch, policy=policy):
            policy.mtp.add_loss(hidden, batch, policy.head_weight)
            chosen = response_logprobs(policy, hidden, batch, 1.0, groups)
            return -LOSS_WEIGHT * chosen.logprobs.sum(), None

        runs = []
        for module in policy.mtp.module.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        policy.zero_grad()
        batches = policy.mtp.begin(policy.chunks, share)
        run_schedule(policy, groups, batches, loss_fn, forward_only=False)
        metrics = policy.mtp.update(0)
        metrics["grad_norm"] = gradient_norm(policy.optimizer)
        metrics["runs"] = len(runs) / len(share)
        found[family] = metrics, gradient_boxes(policy)
    return found


@pytest.mark.parametrize(
    ("dims", "families"),
    [
        *LAYOUTS,
        *(
            pytest.param(dims, MIXTURES if dims.expert > 1 else FAMILIES, marks=pytest.mark.slow)
            for dims in MORE_LAYOUTS
        ),
    ],
    ids=lambda each: layout_name(each) if isinstance(each, ParallelDims) else f"{len(each)} models",
)
def test_loss_and_gradient_equal_those_of_transformers(folders, answers, dims, families):
    chosen = {family: folders[family] for family in families}
    found = run_ranks(dims.world_size, gradients_on_rank, chosen, dims, *ON)
    check(found, {family: answers[family] for family in families})


def check(ranks, answers):
    for family, (loss, expected) in answers.items():
        norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
        actual = {name: torch.full_like(g, torch.nan) for name, g in expected.items()}
        for rank in ranks:
            metrics, boxes = rank[family]
            assert metrics["mtp/loss"] == pytest.approx(loss, rel=1e-5)
            assert metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-5)
            for name, box, values in boxes:
                if name in actual:
                    actual[name][box.slices] = values.double()
        for name, gradient in expected.items():
            error = (actual[name] - gradient).norm()  # an expert may have no tokens
            assert error <= 1e-5 * gradient.norm(), f"{family} {name}: {error:.1e}"


def test_full_recomputation_reaches_the_layer(folders, answers):
    full = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    dims, family = ParallelDims(tensor=2, expert_tensor=1, expert=2), "qwen3_next"
    options = (*ON, f"model.megatron={full}")
    ranks = run_ranks(2, gradients_on_rank, {family: folders[family]}, dims, *options)
    check(ranks, {family: answers[family]})
    assert {rank[family][0]["runs"] for rank in ranks} == {2}


def routed_gradients_on_rank(rank, folders, dims):
    options = (*ON, "rollout.router_replay=true")
    return gradients_on_rank(rank, folders, dims, *options, routes=random_routes())


def test_its_router_chooses_where_those_of_the_policy_replay(tmp_path):
    sizes = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOPK, "num_hidden_layers": LAYERS}
    folder = add_mtp_layer(tiny_model(tmp_path / "model", "glm4_moe", **sizes), norm=1.0)
    answer = Oracle(folder).answer(LENGTHS, random_routes())
    dims, folders = ParallelDims(pipeline=2), {"glm4_moe": folder}
    check(run_ranks(2, routed_gradients_on_rank, folders, dims), {"glm4_moe": answer})


def trained_on_rank(rank, dims, experience, configs):
    """Weights and metrics of a policy after some steps, by config."""
    setup_device(rank)
    groups = init_groups(dims, dynamic_context=configs[0].parallel.dynamic_context_parallel)
    found = {}
    for name, cfg in configs.items():
        policy = build_policy(cfg, trained_shape(cfg), groups)
        batches = batches_of(policy, experience, cfg, groups)
        steps = [
            train_step(policy, batches, cfg, groups, SkippedSteps(1), 0.05).metrics
            for _ in range(3)
        ]
        found[name] = steps, {n: p.detach().clone() for n, p in policy.parameters().items()}
    return found


SETTINGS = ("optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0", "optimizer.max_grad_norm=0.01")
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
DYNAMIC = "parallel.dynamic_context_parallel=true"


def train_with_and_without(folder, dims, *overrides):
    case = Case(folder, {})
    options = (*SETTINGS, *overrides)
    configs = {
        number: config(folder, dims, {}, BUDGETS[0], *options, f"model.mtp_num_layers={number}")
        for number in (0, 1)
    }
    return run_ranks(dims.world_size, trained_on_rank, dims, case.experience(), configs)


@pytest.fixture(scope="module")
def trained(folders):
    """`train_with_and_without`, once for each model and layout."""

    @cache
    def trained(family, dims, *overrides):
        return train_with_and_without(folders[family], dims, *overrides)

    return trained


@pytest.mark.parametrize(
    ("family", "dims", "overrides"),
    [
        ("glm4_moe", ParallelDims(), ()),
        ("qwen3_next", ParallelDims(tensor=2, pipeline=2), ()),
        ("glm4_moe", ParallelDims(pipeline=2, data=2), OVERLAP),
        ("glm4_moe", ParallelDims(context=2), (DYNAMIC,)),
    ],
    ids=str,
)
def test_a_policy_is_trained_to_the_bit_as_without_the_layer(trained, family, dims, overrides):
    ranks = trained(family, dims, *overrides)
    for rank in ranks:
        (without, expected), (steps, weights) = rank[0], rank[1]
        for name, values in expected.items():
            assert torch.equal(weights[name], values), name
        for step, metrics in zip(steps, without, strict=True):
            assert metrics == {n: v for n, v in step.items() if not n.startswith("mtp/")}
    names = {name for rank in ranks for name in rank[1][1].keys() - rank[0][1].keys()}
    assert {name.partition(".")[2].split(".")[0] for name in names} == {"mtp"}


def test_the_layer_learns_the_same_however_the_work_is_shared(trained):
    ((steps, _),) = (rank[1] for rank in trained("glm4_moe", ParallelDims()))
    losses = [step["mtp/loss"] for step in steps]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 0.01
    for dims, overrides in (
        (ParallelDims(pipeline=2, data=2), OVERLAP),
        (ParallelDims(context=2), (DYNAMIC,)),
    ):
        for rank in trained("glm4_moe", dims, *overrides):
            for step, expected in zip(rank[1][0], steps, strict=True):
                for name in ("mtp/loss", "mtp/grad_norm"):
                    assert step[name] == pytest.approx(expected[name], rel=1e-4)


RUN = (*ON, "optimizer.lr=1e-3", "optimizer.lr_warmup_steps=0")


def start(rank, folder, dims, run_dir):
    """A policy, and what it takes to step, with the checkpoints of its run."""
    setup_device(rank)
    groups = init_groups(dims)
    cfg = config(folder, dims, {}, BUDGETS[0], *RUN, f"train.run_dir={run_dir}")
    policy = build_policy(cfg, trained_shape(cfg), groups)
    return policy, cfg, groups, Checkpoints(cfg, policy, None)


def train_and_save(rank, folder, dims, case, run_dir):
    """The state after two steps, which is saved and exported, and after a third one."""
    policy, cfg, groups, checkpoints = start(rank, folder, dims, run_dir)
    batches = batches_of(policy, case, cfg, groups)
    states = []
    for step in range(3):
        train_step(policy, batches, cfg, groups, SkippedSteps(1), 0.0)
        if step > 0:
            states.append(state_of(policy))
        if step == 1:
            checkpoints.save(TrainerState(step=2), {})
            checkpoints.wait()
            export_model(run_dir / "hf", policy, cfg, groups)
    return states


def resume(rank, folder, dims, case, run_dir):
    policy, cfg, groups, checkpoints = start(rank, folder, dims, run_dir)
    assert checkpoints.load().step == 2
    states = [state_of(policy)]
    train_step(policy, batches_of(policy, case, cfg, groups), cfg, groups, SkippedSteps(1), 0.0)
    return [*states, state_of(policy)]


def trained_and_exported(folder, tmp_path):
    """The state of a run as it is saved, its checkpoint, and the weights of exports before and
    after it."""
    run_dir = tmp_path / "run"
    case = Case(folder, {}).experience()
    first, other = ParallelDims(tensor=2, expert_tensor=1, expert=2), ParallelDims(pipeline=2)
    saved, trained = wholes(run_ranks(2, train_and_save, folder, first, case, run_dir))
    resumed, further = wholes(run_ranks(2, resume, folder, other, case, run_dir))
    for name, values in saved.items():
        assert torch.equal(resumed[name], values), name
    moved = [
        name for name in saved if "mtp." in name and not torch.equal(saved[name], trained[name])
    ]
    assert {"mtp.layers.0.eh_proj.weight", "optimizer.state.exp_avg.mtp.layers.0.enorm.weight"} <= {
        *moved
    }
    for name in moved:  # with the learning rate and the correction of the third step
        torch.testing.assert_close(further[name], trained[name], rtol=1e-3, atol=1e-6)
    checkpoint = run_dir / "checkpoints" / "step_2"
    export_checkpoint(checkpoint, tmp_path / "out", hf_config=folder)
    assert verify_weights(checkpoint, run_dir / "hf") == []
    exported, source = (load_file(at / "model.safetensors") for at in (run_dir / "hf", folder))
    assert_same(weights_of(tmp_path / "out"), exported)
    assert exported.keys() == source.keys()
    return saved, checkpoint, source, exported


def test_checkpoints_and_exports_have_the_layer_as_it_is_trained(folders, tmp_path):
    folder = folders["deepseek_v3"]
    saved, checkpoint, source, exported = trained_and_exported(folder, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "own")
    assert read_shape(tmp_path / "own").num_mtp_layers == 1
    own = weights_of(tmp_path / "own")
    assert_same(own, {name: exported[name] for name in own})
    layer = {name for name in source if name.startswith("model.layers.4.")}
    assert {name.removeprefix("model.layers.4.") for name in layer - own.keys()} == {
        "embed_tokens.weight",
        "shared_head.head.weight",
    }
    kept = {name for name in layer if torch.equal(exported[name], source[name])}
    assert {name.removeprefix("model.layers.4.") for name in kept} >= {
        "embed_tokens.weight",  # engines have those of the model in their place
        "shared_head.head.weight",
        "mlp.gate.e_score_correction_bias",
    }
    assert not kept & {f"model.layers.4.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
    torch.testing.assert_close(
        exported["model.layers.4.eh_proj.weight"], saved["mtp.layers.0.eh_proj.weight"]
    )


def test_so_have_those_of_a_multimodal_model(tmp_path):
    folder = add_mtp_layer(tiny_multimodal(tmp_path / "model", "qwen3_5_moe"))
    saved, _, source, exported = trained_and_exported(folder, tmp_path)
    assert read_shape(tmp_path / "run" / "hf").can_train_mtp
    kept = {name for name in source if torch.equal(exported[name], source[name])}
    assert kept == {name for name in source if ".visual." in name}
    assert torch.equal(exported["mtp.fc.weight"], saved["mtp.layers.0.eh_proj.weight"])


def train_with_nan(rank, folder, case, run_dir):
    """Metrics of a step with NaN in the layer, what the step has moved, and what it told."""
    policy, cfg, groups, _ = start(rank, folder, ParallelDims(), run_dir)
    with torch.no_grad():
        policy.mtp.module.module.eh_proj.weight[0, 0] = torch.nan
    before = {name: p.detach().nan_to_num() for name, p in policy.parameters().items()}
    batches = batches_of(policy, case, cfg, groups)
    with redirect_stderr(io.StringIO()) as told:
        metrics = train_step(policy, batches, cfg, groups, SkippedSteps(1), 0.0).metrics
    after = {name: p.detach().nan_to_num() for name, p in policy.parameters().items()}
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    return metrics, moved, told.getvalue()


def test_a_step_of_the_layer_that_is_not_finite_is_skipped_alone(folders, tmp_path):
    case = Case(folders["glm4_moe"], {}).experience()
    folder, run_dir = folders["glm4_moe"], tmp_path / "run"
    ((metrics, moved, told),) = run_ranks(1, train_with_nan, folder, case, run_dir)
    line = "mtp: optimizer step skipped: its loss is nan, the norm of its gradient nan\n"
    assert line in told  # torch may warn, too
    assert (metrics["mtp/skipped_steps"], metrics["skipped_steps"]) == (1, 0)
    assert not {"mtp/loss", "mtp/grad_norm"} & metrics.keys()
    assert moved
    assert not [name for name in moved if "mtp." in name]
