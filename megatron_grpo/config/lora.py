"""The keys of `lora`, by PEFT's names: training of low-rank adapters of a frozen model."""

from difflib import get_close_matches
from math import sqrt
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from megatron_grpo.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), trained in place of the model's weights.

    A linear layer computes W x + s B (A x); A [r, in] and B [out, r] are trained, W is frozen.
    """

    r: NonNegativeInt = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    lora_alpha: PositiveFloat = 16.0
    """Numerator of the scale s = lora_alpha / r."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = (
        "all-linear"
    )
    """Linear layers with adapters, by the ends of their Hugging Face names, such as [q_proj,
    v_proj] or [mlp.down_proj]; all-linear: all except the head."""
    exclude_modules: tuple[str, ...] = Field(default=(), strict=False)
    """Linear layers without adapters, by the ends of their names."""
    use_rslora: bool = False
    """Whether s is lora_alpha / sqrt(r) (arXiv 2312.03732)."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """Start of A: uniform as in PEFT (true), or normal with deviation 1 / r. B starts at 0."""
    adapter_path: Path | None = Field(default=None, strict=False)
    """PEFT folder of adapters that a new run starts from, such as hf/ of another run; null: fresh
    ones. With grpo.sync_ref_model the reference of grpo.beta starts with them, too; otherwise it
    has no adapters."""
    sync: Literal["adapter", "merged"] = "adapter"
    """Tensors of a push: `adapter` sends A and s B to engines that loaded the model themselves;
    `merged` sends W + s B A, for any engine."""

    @property
    def is_served(self) -> bool:
        """Whether engines apply adapters to weights that they have loaded themselves."""
        return self.r > 0 and self.sync == "adapter"

    @property
    def scale(self) -> float:
        """The factor s of B A."""
        return self.lora_alpha / (sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, linears: list[str], others: list[str]) -> list[str]:
        """Choose the layers with an adapter among `linears`, e.g. ``model.layers.0.mlp.up_proj``.

        `others` are the names that cannot have one: experts, routers and tables. Raises ValueError
        for a name in the config that fits no layer, or only a layer of `others`.
        """
        for key in ("target_modules", "exclude_modules"):
            if (names := getattr(self, key)) != "all-linear":
                self._check_known(key, names, linears, others)
        # Every name is compared once: a large mixture of experts has tens of thousands.
        wanted = [name for name in linears if self._is_target(name, is_linear=True)]
        if refused := [name for name in others if self._is_target(name, is_linear=False)]:
            raise ValueError(
                f"lora.target_modules names {refused[0]}, which cannot have an adapter here: name "
                f"others, such as {_ends(linears)}, with their parents if need be"
            )
        if not wanted:
            raise ValueError("lora.exclude_modules leaves no layer with an adapter: leave it out")
        return wanted

    def _is_target(self, name: str, is_linear: bool) -> bool:
        if _ends_with(name, self.exclude_modules):
            return False
        if self.target_modules == "all-linear":
            return is_linear or ".experts." in name
        return _ends_with(name, self.target_modules)

    @staticmethod
    def _check_known(
        key: str, names: tuple[str, ...], linears: list[str], others: list[str]
    ) -> None:
        for name in names:
            if any(_ends_with(each, (name,)) for each in linears + others):
                continue
            ends = [*dict.fromkeys(each.rpartition(".")[2] for each in linears)]
            (nearest,) = get_close_matches(name, ends, 1, cutoff=0)
            raise ValueError(
                f"lora.{key}: the model has no linear layer {name} that could have an adapter, did "
                f"you mean {nearest}?"
            )


def _ends_with(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _ends(names: list[str]) -> str:
    return "[" + ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) + "]"
