"""The two steps of `replays` in float64 on models of transformers, with the features of a pair.

Each feature has its place in a step, and the places are in one order: adapters are merged, the sum
is rounded, routers and indexers choose what engines chose, the gradient goes back through the merge
to what is trained, and AdamW or Muon moves it.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from checkpoint_convert import read_shape
from checkpoint_convert.megatron import file_layout
from checkpoint_convert.text_tower import text_name
from helpers.models.conversions import weights_of
from helpers.models.images import logits
from helpers.models.towers import as_published
from helpers.oracle.grpo import OracleLoss, in_float64, oracle_loss
from helpers.oracle.mtp import MtpOracle
from helpers.oracle.optimizers import orthogonalized
from helpers.oracle.policies import gradients_of, load_oracle, unstacked
from helpers.oracle.quantization import is_quantized, rounded
from helpers.oracle.routes import INDEX_TOPK, TOPK, attend, follow
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from parallel.packing import TokenSequence
from parallel.views import as_local

Tensors = dict[str, Tensor]
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight", "visual.pos_embed.weight")


@dataclass
class Mover:
    """AdamW, or Muon for matrices, behind a clip of the gradient's norm."""

    cfg: Config
    is_muon: bool
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    steps: int = 0

    def step(self, weights: Tensors, gradients: Mapping[str, Tensor]) -> float:
        """Move `weights`; returns the norm before the clip."""
        cfg, self.steps = self.cfg.optimizer, self.steps + 1
        norm = float(torch.cat([each.flatten() for each in gradients.values()]).norm())
        scale = min(1.0, cfg.max_grad_norm / (norm + 1e-6))
        for name, gradient in gradients.items():
            weight, g = weights[name], gradient * scale
            first, second = self.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            if self.is_muon and g.dim() == 2 and name not in EMBEDDINGS:
                beta = cfg.muon_momentum
                first = beta * first + (1 - beta) * g
                size = cfg.muon_extra_scale_factor * math.sqrt(max(g.shape))
                update = size * orthogonalized(beta * first + (1 - beta) * g)
            else:
                first = cfg.adam_beta1 * first + (1 - cfg.adam_beta1) * g
                second = cfg.adam_beta2 * second + (1 - cfg.adam_beta2) * g**2
                m = first / (1 - cfg.adam_beta1**self.steps)
                v = second / (1 - cfg.adam_beta2**self.steps)
                update = m / (v.sqrt() + cfg.adam_eps)
            decay = cfg.weight_decay if g.dim() > 1 else 0.0
            weights[name] = weight - cfg.lr * (update + decay * weight)
            self.moments[name] = first, second
        return norm


class Oracle:
    """A run of `cfg` in float64, which writes models to `folder`."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        self.cfg, self.folder, self.shape = cfg, folder, read_shape(cfg.model.path)
        self.stored = {name: each.double() for name, each in weights_of(cfg.model.path).items()}
        named = {text_name(name): each for name, each in self.stored.items()}
        self.base = unstacked(named, self.shape)
        self.base |= {name: each for name, each in named.items() if name.startswith("visual.")}
        self.adapters: Tensors = {}
        self.reference: Tensors = {}
        self.mover = Mover(cfg, cfg.optimizer.optimizer == "muon")
        self.layers_mover = Mover(cfg, is_muon=False)
        self.num_written = 0

    @property
    def trained(self) -> Tensors:
        return self.adapters or self.base

    @property
    def moved(self) -> set[str]:
        """Names of what steps have moved."""
        return {*self.mover.moments, *self.layers_mover.moments}

    def merged(self, trained: Tensors) -> Tensors:
        """Weights of the policy or the reference: with adapters, the base with s B A added."""
        if not self.adapters:
            return trained
        weights = dict(self.base)
        for name, a in trained.items():
            if ".lora_A." in name:
                b = trained[name.replace("lora_A", "lora_B")]
                weights[merges_into(name)] = weights[merges_into(name)] + self.scale * b @ a
        return weights

    @property
    def scale(self) -> float:
        return self.cfg.lora.lora_alpha / self.cfg.lora.r

    def computing(self) -> Tensors:
        """Weights that the policy computes with."""
        weights = self.merged(self.trained)
        if not self.cfg.rollout.quantization_aware:
            return weights
        scheme = self.cfg.rollout.quantization
        return {
            name: rounded(each.float(), scheme).double() if is_quantized(name) else each
            for name, each in weights.items()
        }

    def written(self, weights: Tensors) -> Path:
        """A folder with these weights, as the model's files store them."""
        files, tensors = file_layout(self.shape), {n: t.clone() for n, t in self.stored.items()}
        for name, each in tensors.items():
            if (own := text_name(name)) in weights:
                each.copy_(weights[own])
        by_own_name = {text_name(name): each for name, each in tensors.items()}
        for piece in files.pieces:
            if piece.local in by_own_name:
                stack = by_own_name[piece.local].view(files.shapes[piece.local])
                part = as_local(weights[piece.tensor], piece.axes, stack.dim())
                stack[piece.local_box.slices].copy_(part)
        self.num_written += 1
        copy = self.folder / str(self.num_written)
        shutil.copytree(self.cfg.model.path, copy)
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return copy

    def step(self, experience: Experience, weights: Tensors) -> dict[str, float]:
        """Train one step on a generation, from these trained weights; returns its metrics."""
        samples, cfg = experience.samples, self.cfg
        own = {name: each.double() for name, each in weights.items()}
        self.adapters, self.base = (own, self.base) if cfg.lora.r else ({}, self.base | own)
        self.reference = self.reference or dict(self.trained)
        folder = self.written(self.computing())
        model = self.load(folder)
        logprobs = [self.logprobs(model, sample) for sample in samples]
        with torch.no_grad():
            reference = self.load(self.written(self.merged(self.reference)))
            others = [replace(sample, routes=None) for sample in samples]
            ref_logprobs = [self.logprobs(reference, sample) for sample in others]
        names = OracleLoss.__dataclass_fields__.keys() & type(cfg.grpo).model_fields.keys()
        loss = oracle_loss(
            logprobs,
            experience.advantages.tolist(),
            OracleLoss(**{name: getattr(cfg.grpo, name) for name in names}),
            ref_logprobs=ref_logprobs,
            rollout_logprobs=[torch.tensor(sample.logprobs).double() for sample in samples],
        )
        metrics = {"loss": float(loss.detach())}
        gradients = self.through_merge(self.gradients(model, loss))
        if cfg.model.mtp_num_layers:
            replays = cfg.rollout.router_replay
            routes = [self.chosen(sample)[0] for sample in samples] if replays else None
            metrics["mtp/loss"], own = MtpOracle(folder).answer([*map(sequence, samples)], routes)
            metrics["mtp/grad_norm"] = self.layers_mover.step(self.stored, own)
            self.base |= {name: self.stored[name] for name in own}
        metrics["grad_norm"] = self.mover.step(self.trained, gradients)
        if cfg.grpo.sync_ref_model:
            alpha = cfg.grpo.ref_model_mixup_alpha
            for name, weight in self.trained.items():
                self.reference[name] = alpha * weight + (1 - alpha) * self.reference[name]
        return metrics

    def load(self, folder: Path) -> Any:
        return load_oracle(
            folder,
            AutoModelForImageTextToText if self.cfg.data.image_column else AutoModelForCausalLM,
        )

    def logprobs(self, model: Any, sample: Sample) -> Tensor:
        """Log-probabilities of a completion, with the choices of its routers and indexers if it has
        them."""
        decoder = SimpleNamespace(model=getattr(model.model, "language_model", model.model))
        whole, images, hooks = sequence(sample), sample.prompt.images, []
        if sample.routes is not None:
            experts, tokens = self.chosen(sample)
            hooks += follow(decoder, [experts]) if self.cfg.rollout.router_replay else []
            hooks += attend(decoder, [tokens]) if self.cfg.rollout.indexer_replay else []
        with in_float64():
            found = logits(model, whole.tokens[None], images and images.read())
        for hook in hooks:
            hook.remove()
        found = found[0, whole.num_prompt_tokens - 1 : -1] / self.cfg.rollout.temperature
        completion = whole.tokens[whole.num_prompt_tokens :]
        return found.log_softmax(-1).gather(1, completion[:, None])[:, 0]

    def chosen(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Experts, and tokens of indexers."""
        routes = torch.from_numpy(sample.routes).long()
        return routes[..., :TOPK], routes[..., -INDEX_TOPK:]

    def gradients(self, model: Any, loss: Tensor) -> Tensors:
        """Gradients of the policy's weights, by their names in it."""
        stored = as_published(gradients_of(model, loss), model.config.model_type)
        named = {text_name(name): each for name, each in stored.items()}
        found = unstacked(named, self.shape)
        if not self.cfg.model.freeze_vision:
            found |= {name: each for name, each in named.items() if name.startswith("visual.")}
        return found

    def through_merge(self, gradients: Tensors) -> Tensors:
        """Gradients of what is trained: of W + s B A, dA = s B^T dW and dB = s dW A^T."""
        found = {}
        for name, a in self.adapters.items():
            if ".lora_A." in name:
                b, of_sum = name.replace("lora_A", "lora_B"), gradients[merges_into(name)]
                found[name] = self.scale * self.adapters[b].T @ of_sum
                found[b] = self.scale * of_sum @ a.T
        return found or gradients


def merges_into(name: str) -> str:
    """The weight of an adapter's A."""
    return name.removeprefix("base_model.model.").replace(".lora_A", "")


def sequence(sample: Sample) -> TokenSequence:
    """A sample's tokens, with all else as MTP's loss has it."""
    prompt, completion = [*sample.prompt.token_ids], [*sample.completion_ids]
    return TokenSequence(
        tokens=torch.tensor(prompt + completion),
        num_prompt_tokens=len(prompt),
        advantage=1.0,
        loss_weight=1.0,
        rollout_logprobs=torch.zeros(len(completion)),
    )
