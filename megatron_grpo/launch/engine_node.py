"""Which node of a rollout engine this is."""

from dataclasses import dataclass

from parallel import divisors


@dataclass(frozen=True)
class EngineNode:
    """One node of an engine. The names are those of vLLM's and torchrun's options."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    """The address of node 0 for the other nodes."""
    master_port: int = 29501
    """A free port there: first for these connections, then for those of vLLM's workers."""

    def check(self, tensor_parallel_size: int) -> None:
        """Raise ValueError if an engine of so many GPUs has no such node."""
        fitting = divisors(tensor_parallel_size)
        if self.nnodes not in fitting:
            raise ValueError(
                f"--nnodes {self.nnodes} does not divide rollout.tensor_parallel_size "
                f"{tensor_parallel_size}: use one of {fitting}"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is not one of {self.nnodes} nodes (--nnodes): use 0 "
                f"to {self.nnodes - 1}"
            )

    @property
    def meeting_point(self) -> str:
        """For messages."""
        return f"{self.master_addr} port {self.master_port}"


ONE_NODE = EngineNode()
