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

    names: list[str]
    dtypes: list[str]
    """For each of `names`, the dtype in which its elements are sent, as torch names it, such as
    "bfloat16"."""
    boxes: list[list[NonNegativeInt]]
    """Number in `names`, then start and size along each dimension."""

    @classmethod
    def of(cls, copies: Sequence[Copy], dtypes: Mapping[str, torch.dtype]) -> "WirePlan":
        """The plan of a rank's copies to one worker; `dtypes` are those of its parameters."""
        numbers: dict[str, int] = {}
        boxes = []
        for copy in copies:
            number = numbers.setdefault(copy.destination, len(numbers))
            boxes.append([number, *copy.destination_box.start, *copy.destination_box.size])
        names = [str(dtypes[name]).removeprefix("torch.") for name in numbers]
        return cls(list(numbers), names, boxes)

    @classmethod
    def from_json(cls, text: str | bytes) -> "WirePlan":
        """The inverse of `to_json`; ValueError, with what is wrong, for anything else."""
        try:
            plan = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(f"not a plan of arriving weights: {error}") from error
        for name in plan.dtypes:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"not a plan of arriving weights: {name!r} is not a dtype")
        if len(plan.dtypes) != len(plan.names):
            raise ValueError(
                f"not a plan of arriving weights: {len(plan.dtypes)} dtypes of "
                f"{len(plan.names)} parameters"
            )
        for box in plan.boxes:
            if len(box) < 3 or not len(box) % 2 or box[0] >= len(plan.names):
                raise ValueError(f"not a plan of arriving weights: {box} is not a box")
        return plan

    @property
    def torch_dtypes(self) -> list[torch.dtype]:
        """The dtype in which the elements of each of `boxes` are sent."""
        return [getattr(torch, self.dtypes[number]) for number, *_ in self.boxes]

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
        f"{name} is {parameters[name].dtype}, and arrives as torch.{dtype}": None
        for plan in plans
        for name, dtype in zip(plan.names, plan.dtypes, strict=True)
        if name in parameters and str(parameters[name].dtype) != f"torch.{dtype}"
    }
    for name, box in (*arrivals, *zeros):
        if name in shapes and len(box.start) != len(shapes[name]):
            faults[f"{name}: {box} is not a box of its shape {shapes[name]}"] = None
    if faults:
        raise ValueError("the weights do not fit the parameters:\n  " + "\n  ".join(faults))
    check_arrivals(
        Layout(shapes, (), zeros), [Copy(name, box, name, box) for name, box in arrivals]
    )
