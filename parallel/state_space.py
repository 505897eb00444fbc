"""Mamba-2's state space model over packed sequences, in plain torch (arXiv 2405.21060).

Linear attention without the correction of the delta rule. The memory of a head is a matrix S
[keys, values]; token t lets it decay, adds to it, and reads it:

    S_t = a_t S_(t-1) + k_t v_t'      o_t = S_t' q_t

with a_t = exp(decay). In the paper's names S is the state, q is C, k is B and v is the step times
x. Within a chunk of tokens these are products of matrices (section 6); chunks follow each other.
"""

import torch
from torch import Tensor

from parallel.delta_rule import Chunks, decays


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    chunks: Chunks,
    memory: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, heads, value size] of packed sequences, and S after each sequence.

    `query` and `key` [T, groups, key size] each serve heads / groups neighbouring heads; `value`
    [T, heads, value size]; `decay` [T, heads] is log a. `memory` [n, groups, key size, values of a
    group] is S before each sequence, None: 0. Computed in the dtype of the arguments.
    """
    chunked, by_group = chunks.of_tokens, (key.shape[1], -1)
    query, key, value = chunked(query), chunked(key), chunked(value).unflatten(1, by_group)
    between, since, until = (each.unflatten(1, by_group) for each in decays(chunked(decay)))
    near = ((query @ key.mT).unsqueeze(2) * between) @ value
    # Heads of a group share keys: with values side by side, one product serves them all.
    added = key.mT @ _side_by_side(value * until)
    stays = _side_by_side(since[..., -1:, :].expand_as(value[..., -1:, :]))
    if memory is None:
        memory = added.new_zeros(len(chunks.sequences), *added.shape[1:])
    memory, before, ended = memory[chunks.sequences], [], []
    for stay, new in zip(chunks.by_step(stays), chunks.by_step(added), strict=True):
        memory, end = memory.split([len(new), len(memory) - len(new)])
        before.append(memory)
        memory = memory * stay + new
        ended.append(end)
    far = query @ torch.cat(before)[chunks.order.argsort()]
    far = far.unflatten(-1, (value.shape[2], -1)).transpose(2, 3)
    outputs = (near + far * since).flatten(1, 2)
    memories = torch.cat([memory, *reversed(ended)])[chunks.sequences.argsort()]
    return outputs.transpose(1, 2).flatten(0, 1)[chunks.slots], memories


def _side_by_side(heads: Tensor) -> Tensor:
    """Lay [chunks, groups, heads, rows, columns] out as [chunks, groups, rows, heads * columns]."""
    return heads.transpose(2, 3).flatten(3)
