"""Training state offloaded from a GPU: its memory is free, and the same bits come back."""

from dataclasses import dataclass, field

import torch

from megatron_grpo.policy.residency import Residency, Room
from parallel.page_locked import page_locked_bytes

SIZE = 256 << 20


@dataclass
class State:
    """A part of the state that is copied, and one that is freed."""

    optimizer: torch.Tensor = field(
        default_factory=lambda: torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    )
    gradients: torch.Tensor = field(
        default_factory=lambda: torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    )

    def residency(self) -> Residency:
        rooms = [
            Room("optimizer", self.optimizer, page_locked_bytes(SIZE)),
            Room("gradients", self.gradients, None),
        ]
        return Residency("optimizer", rooms, torch.device("cuda", 0))


def test_offloaded_state_is_free_and_comes_back_bit_for_bit(alone):
    state = State()
    residency, view = state.residency(), state.optimizer.view(torch.float32)[7:]
    before, content = torch.cuda.memory_reserved(), state.optimizer.cpu()
    for _ in range(3):
        residency.enter("push")
        assert torch.cuda.memory_reserved() <= before - 2 * SIZE
        assert torch.equal(residency.readable(state.optimizer), content)
        torch.full((2 * SIZE,), 1, dtype=torch.uint8, device="cuda")  # in the memory that is free
        residency.enter("log-probabilities")  # the copy goes on meanwhile
        residency.enter("train")
        state.gradients.fill_(3)
        assert torch.equal(state.optimizer.cpu(), content)
        state.optimizer += 1  # this wraps around
        content = state.optimizer.cpu()
    assert view.untyped_storage() is state.optimizer.untyped_storage()


def test_state_can_leave_while_it_comes_back(alone):
    state = State()
    residency, content = state.residency(), state.optimizer.cpu()
    for _ in range(5):
        residency.enter("generate")
        residency.enter("log-probabilities")
        assert torch.equal(residency.readable(state.optimizer).cpu(), content)
        residency.enter("generate")
        residency.enter("log-probabilities")
    residency.enter("train")
    assert torch.equal(state.optimizer.cpu(), content)
