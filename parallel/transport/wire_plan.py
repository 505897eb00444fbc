"""What one trainer rank sends to one worker: validated JSON in a meeting's store, not pickles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from parallel.layout import Box, Copy, Layout
from parallel.reshard import check_arrivals


@dataclass(frozen=True)
class WirePlan:
    """The boxes of a worker's parameters that arrive from one rank, in order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dtype: str
    """The dtype in which elements are sent, by torch's name, such as "bfloat16"."""
    names: list[str]
    boxes: list[list[NonNegativeInt]]
    """Number in `names`, then start and size along each dimension."""

    @classmethod
    def of(cls, copies: Sequence[Copy], dtype: torch.dtype) -> "WirePlan":
        """The plan of a rank's copies to one worker."""
        numbers: dict[str, int] = {}
        boxes = []
        for copy in copies:
            number = numbers.setdefault(copy.destination, len(numbers))
            boxes.append([number, *copy.destination_box.start, *copy.destination_box.size])
        return cls(str(dtype).removeprefix("torch."), list(numbers), boxes)

    @classmethod
    def from_json(cls, text: str | bytes) -> "WirePlan":
        """The inverse of `to_json`; ValueError, with what is wrong, for anything else."""
        try:
            plan = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(f"not a plan of arriving weights: {error}") from error
        if not isinstance(getattr(torch, plan.dtype, None), torch.dtype):
            raise ValueError(f"not a plan of arriving weights: {plan.dtype!r} is not a dtype")
        for box in plan.boxes:
            if len(box) < 3 or not len(box) % 2 or box[0] >= len(plan.names):
                raise ValueError(f"not a plan of arriving weights: {box} is not a box")
        return plan

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which elements are sent."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def to_json(self) -> str:
        """The plan as JSON text, as published in the store."""
        return TypeAdapter(WirePlan).dump_json(self).decode()

    def arrivals(self) -> list[tuple[str, Box]]:
        """The boxes in order, each with the name of its parameter."""
        return [
            (self.names[number], Box(tuple(ends[: len(ends) // 2]), tuple(ends[len(ends) // 2 :])))
            for number, *ends in self.boxes
        ]


def check_plans(
    plans: Sequence[WirePlan], parameters: Mapping[str, Tensor], zeros: tuple[tuple[str, Box], ...]
) -> None:
    """Raise ValueError, naming every parameter at fault, unless all plans together fit a worker.

    Every element of `parameters` must arrive exactly once, in the dtype of the parameter, except
    for the padding `zeros`, which must not arrive.
    """
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    arrivals = [arrival for plan in plans for arrival in plan.arrivals()]
    faults = {
        f"{name} is {parameters[name].dtype}, and arrives as torch.{plan.dtype}": None
        for plan in plans
        for name in plan.names
        if name in parameters and str(parameters[name].dtype) != f"torch.{plan.dtype}"
    }
    for name, box in (*arrivals, *zeros):
        if name in shapes and len(box.start) != len(shapes[name]):
            faults[f"{name}: {box} is not a box of its shape {shapes[name]}"] = None
    if faults:
        raise ValueError("the weights do not fit the parameters:\n  " + "\n  ".join(faults))
    check_arrivals(
        Layout(shapes, (), zeros), [Copy(name, box, name, box) for name, box in arrivals]
    )
