"""Rows that train the MTP layer, against the layers of transformers."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert import read_shape
from helpers.models.tiny import HYBRIDS
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    SHARING,
    Boxes,
    gradient_boxes,
    load_oracle,
    own_share,
    pack_all,
    random_sequences,
    sequences_with_equal_beginnings,
    whole,
)
from helpers.oracle.routes import REPLAY, follow, random_routes
from helpers.oracle.rows import Kind, Row, Worlds
from megatron_grpo.policy.forward import response_logprobs, run_schedule
from megatron_grpo.policy.optimizer import gradient_norm
from megatron_grpo.policy.router import with_own_layers
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.groups import Groups
from parallel.packing import PackedBatch, TokenSequence, pack

TEMPERATURE = 0.8
ON = ("model.mtp_num_layers=1", f"rollout.temperature={TEMPERATURE}", "optimizer.max_grad_norm=1e9")
Answer = tuple[float, dict[str, Tensor]]
"""Loss, and gradients by the names of the weight files."""


class MtpOracle:
    """Loss and gradients of a model's MTP layer in float64, sequence by sequence: DeepSeek-V3's
    equations 21 to 25 with the decoder layer of `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.folder, last = folder, read_shape(folder).num_layers
        behind = self.prefix = self.own_prefix = f"model.layers.{last}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        deeper = Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.copytree(folder, deeper, dirs_exist_ok=True)
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

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, self.size, weight + 1 if self.is_apart else weight, self.eps)

    def logprobs(self, sequence: TokenSequence) -> Tensor:
        """Log-probabilities of the response tokens from position 2 on, which MTP predicts."""
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

    def answer(
        self, sequences: Sequence[TokenSequence], routes: Sequence[Tensor] | None = None
    ) -> Answer:
        """`routes`: experts of each sequence's tokens in the model; None: its routers choose."""
        logprobs = []
        for number, sequence in enumerate(sequences):
            if routes is not None:
                self.model = load_oracle(self.folder)
                follow(self.model, [routes[number]])
            logprobs.append(self.logprobs(sequence))
        logprobs = torch.cat(logprobs)
        loss = -logprobs.mean()
        loss.backward()
        layer_gradients = {
            n: p.grad for n, p in self.deeper.named_parameters() if p.grad is not None
        }
        behind = f"model.layers.{len(self.deeper.model.layers) - 1}."
        gradients = {
            name.replace(behind, self.prefix): gradient
            for name, gradient in revert_weight_conversion(self.deeper, layer_gradients).items()
            if behind in name
        }
        own = {f"{self.own_prefix}{name}.weight": each.grad for name, each in self.own.items()}
        return float(loss.detach()), gradients | own


class Mtp(Kind):
    """Loss and gradient of the MTP layer alone."""

    name, overrides = "mtp", ON

    def packed(self, dims: ParallelDims) -> list[PackedBatch]:
        return pack_all(LENGTHS, dims)

    def found(self, row: Row, folder: Path, groups: Groups) -> tuple[dict[str, float], Boxes]:
        """Metrics, and boxes of the gradient."""
        share = own_share(self.packed(groups.dims), groups)
        policy = self.policy(self.config(row, folder, groups.dims), groups)
        runs: list[int] = []

        def loss_fn(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
            policy.mtp.add_loss(hidden, batch, policy.head_weight)
            chosen = response_logprobs(policy, hidden, batch, 1.0, groups)
            return -LOSS_WEIGHT * chosen.logprobs.sum(), None

        for module in policy.mtp.module.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(lambda *_: runs.append(1))
        policy.zero_grad()
        batches = policy.mtp.begin(policy.chunks, [with_own_layers(b, groups) for b in share])
        run_schedule(policy, groups, batches, loss_fn, forward_only=False)
        metrics = policy.mtp.update(0)
        gradient_norm(policy.optimizer)
        return metrics | {"runs": len(runs) / len(share)}, gradient_boxes(policy)

    def oracle(self, folder: Path) -> Any:
        return MtpOracle(folder).answer(random_sequences(LENGTHS))

    def check(self, row: Row, worlds: Worlds, ranks: Sequence[Any]) -> None:
        answer: Any = worlds.oracle(row)
        loss, expected = answer
        norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
        runs = 2 if any("=full" in override for override in row.overrides) else 1
        for metrics, _ in ranks:
            assert metrics["mtp/loss"] == pytest.approx(loss, rel=1e-5)
            assert metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert metrics["runs"] in (0, runs)  # on the last stage
        actual = whole([boxes for _, boxes in ranks])
        for name, gradient in expected.items():
            error = (actual[name].double() - gradient).norm()  # an expert may have no tokens
            assert error <= 1e-5 * gradient.norm(), f"{name}: {error:.1e}"


class RoutedMtp(Mtp):
    """The policy's routers replay choices, while the MTP layer's router chooses itself."""

    name, overrides = "routed mtp", (*ON, REPLAY)

    def packed(self, dims: ParallelDims) -> list[PackedBatch]:
        return pack_all(LENGTHS, dims, random_routes())

    def oracle(self, folder: Path) -> Any:
        return MtpOracle(folder).answer(random_sequences(LENGTHS), random_routes())


class SharedMtp(Mtp):
    """What sequences share is computed once, its last token's second tokens for each of them."""

    name, overrides = "shared mtp", (*ON, "grpo.shared_prompts=true")

    def packed(self, dims: ParallelDims) -> list[PackedBatch]:
        alignment = Alignment.for_mesh(dims, dims.tensor > 1)
        sequences = sequences_with_equal_beginnings()
        return [pack(sequences, each, alignment, share_prompts=True) for each in SHARING]

    def oracle(self, folder: Path) -> Any:
        return MtpOracle(folder).answer(sequences_with_equal_beginnings())
