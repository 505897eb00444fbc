"""The state of a push in one worker of an engine, and the check that it has arrived.

The check compares the workers' reports with the checksums of what the ranks have sent.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.vision import VISION
from checkpoint_convert.text_tower import is_of_text, text_name

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Json = dict[str, Any]

VISION_VARIABLE = "MEGATRON_GRPO_VISION"
"""Set in the environment of an engine if pushes fill the vision tower, too."""

LOADED_VERSION = 0
"""Version of weights that an engine loaded from its own folder."""
LOADED = f"{LOADED_VERSION}-loaded"
"""Push id of weights that an engine loaded from its own folder."""


DROPPED = "none, as the weights were dropped"


@dataclass
class PushState:
    """The state of pushes in one worker."""

    channels: str = ""
    """Id of the channels that it has, or should have; each trainer makes its own."""
    push: str = ""
    """Id of the push that began last."""
    is_loaded: bool = False
    """Whether that push has written every parameter."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Checksums of all parameters, by name, once that push is loaded."""
    error: str = ""
    """Why that push was not loaded, or why there are no channels."""
    held: str = ""
    """Id of the complete push in the parameters; empty before the first and during a push."""

    def use_channels(self, channels: str) -> None:
        """Receive weights over `channels` alone from now on; ends an open push over others."""
        self.channels = channels
        self.push, self.is_loaded, self.held = "", False, ""

    def begin_push(self, push: str, channels: str) -> None:
        """Begin a push: until it is complete, the weights have no version.

        It is ignored if another trainer has connected since: the last trainer owns the engine, and
        the others see that in the reports.
        """
        # `error` stays: it is about the channels, which were opened before.
        if channels == self.channels:
            self.push, self.is_loaded, self.held = push, False, ""

    def drop_weights(self) -> None:
        """Hold no weights until the next push, not even the engine's own (`hold_loaded`)."""
        self.push, self.is_loaded, self.held = DROPPED, False, ""

    def mark_loaded(self, sums: Mapping[str, int]) -> None:
        self.is_loaded, self.sums = True, sums

    def finish_push(self, push: str) -> None:
        """Hold the weights of `push`, if it began last and is loaded."""
        if push == self.push and self.is_loaded:
            self.held = push

    def held_push(self) -> Json:
        return {"push": self.held}

    def hold_loaded(self) -> None:
        """Hold the weights of the engine's own folder, unless a push may have changed them."""
        if not self.channels and not self.push:
            self.held = LOADED

    def push_report(self) -> Json:
        return {
            "push": self.push,
            "is_loaded": self.is_loaded,
            "error": self.error,
            "sums": self.sums,
        }

    @contextmanager
    def keep_error(self) -> Iterator[None]:
        """Catch what the block raises: print the traceback to the log and keep it as `error`."""
        self.error = ""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.error = str(error) or repr(error)


ABSORBED = (".W_UK_T", ".W_UV")
"""Name endings of vLLM's copies of the weight that projects latents up."""


def pushable_parameters(model: "Module", with_vision: bool = False) -> dict[str, "Tensor"]:
    """Parameters of an engine's model, by their names in a text model.

    Parameters that share memory are listed once. A multimodal model has its text tower's, and
    `with_vision` its vision tower's. Where rows of gate and up alternate, [experts, 2 * size, ...]
    becomes [experts, size, 2, ...].
    """
    first: dict[int, tuple[str, Tensor]] = {}
    is_multimodal = hasattr(model, "language_model") or hasattr(model, "visual")  # SGLang's
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    experts = None if family is None else family.experts
    alternates = experts is not None and experts.stacks == "alternating"
    for name, parameter in model.named_parameters():
        # Modules with adapters hold their weights in a `base_layer`.
        name = text_name(name).replace(".base_layer.", ".")
        is_vision = with_vision and name.startswith(VISION)
        # ABSORBED are views for decode steps, or, of a quantised weight, copies that are recomputed
        # after each push (`absorb_latents` in vllm/worker.py).
        if name.endswith(ABSORBED) or (is_multimodal and not (is_of_text(name) or is_vision)):
            continue
        # GPU kernels want 8-bit weights as [columns, rows], and vLLM makes them a transposed view:
        # turned back, they are as in memory and in the weight files.
        is_transposed = parameter.itemsize == 1 and not parameter.is_contiguous()
        value = parameter.t() if is_transposed else parameter
        if alternates and ".w13_" in name:
            value = value.unflatten(1, (-1, 2))
        first.setdefault(value.untyped_storage().data_ptr(), (name, value))
    return dict(first.values())


def drafter_parameters(
    drafter: "Module", model: "Module", *, is_apart: bool
) -> dict[str, "Tensor"]:
    """Parameters of an engine's multi-token-prediction layer, by their names in the model, without
    the shared embedding and head; `is_apart`: vLLM names them like a whole model."""
    shared = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def own_name(name: str) -> str:
        name = name.replace(".mtp_block.", ".")
        return name.replace("model.", "mtp.", 1) if is_apart else name

    return {
        own_name(name): value
        for name, value in pushable_parameters(drafter).items()
        if value.untyped_storage().data_ptr() not in shared
    }


def parameter_table(parameters: Mapping[str, "Tensor"]) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype (such as ``bfloat16``) of every parameter, by name."""
    return {
        name: (list(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in parameters.items()
    }


WorkerSums = Mapping[str, int]
"""Checksums of the parameters of one worker, by name."""

NUM_NAMES_SHOWN = 8


class PushFailed(ConnectionError):
    """Engines have not loaded a push, or hold other weights than those of the ranks."""

    def __init__(self, faults: Mapping[str, Sequence[str]]) -> None:
        """`faults`: lines about workers, by address of their engine."""
        lines = "\n  ".join(chain(*faults.values()))
        super().__init__(f"the push of new weights failed:\n  {lines}")
        self.faults = faults


def check_reports(
    base_urls: Sequence[str],
    reports: Sequence[Sequence[Json]],
    push: str,
    expected: Sequence[WorkerSums] | None,
) -> None:
    """Compare `PushState.push_report` of every worker with the `expected` checksums.

    `expected` is None if sending failed: then only errors of workers count. Raises a PushFailed
    that names engine, worker and parameters.
    """
    faults: dict[str, list[str]] = {}
    for url, workers in zip(base_urls, reports, strict=True):
        for rank, report in enumerate(workers):
            if fault := _fault(report, push, expected[rank] if expected else None):
                faults.setdefault(url, []).append(f"rollout engine {url} worker {rank}: {fault}")
    if faults:
        raise PushFailed(faults)


def _fault(report: Json, push: str, expected: WorkerSums | None) -> str:
    if report["push"] != push:
        return f"another trainer has connected to it (its push: {report['push'] or 'not begun'})"
    if not report["is_loaded"]:
        return str(report["error"] or "it has not loaded the weights")
    if expected is None:
        return ""
    sums: WorkerSums = report["sums"]
    differing = [name for name in {**expected, **sums} if expected.get(name) != sums.get(name)]
    if not differing:
        return ""
    shown = ", ".join(differing[:NUM_NAMES_SHOWN])
    more = f" and {rest} more" if (rest := len(differing) - NUM_NAMES_SHOWN) > 0 else ""
    return f"{len(differing)} of {len(sums)} parameters differ from what was pushed: {shown}{more}"
