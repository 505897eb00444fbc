"""Linear attention of vLLM on CPUs; test_speculative.py has an engine that computes with it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

KEYS, HEADS, SIZE, KERNEL = 2, 4, 8, 4  # key heads, value heads, head size, convolution width
CHANNELS = (2 * KEYS + HEADS) * SIZE


def test_states_of_drafts_are_kept_up_to_the_accepted_token():
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    num_drafted, before, taken, lengths = 2, (5, 2, 4), (0, 1, 2), (1, 3, 2)
    attend = heads_of_vllm(num_slots=16, num_spec=num_drafted)
    sizes = [
        first + 1 + few + last for first, few, last in zip(before, taken, lengths, strict=True)
    ]
    texts = [text(size) for size in sizes]
    slots = torch.arange(9).view(3, 3) + 1
    expected = [attend([each], runs(torch.tensor([10 + n]))) for n, each in enumerate(texts)]
    first = attend([cut(x, 0, n) for x, n in zip(texts, before, strict=True)], runs(slots[:, 0]))
    # Some tokens of the first drafts are rejected.
    drafts = [
        [
            torch.cat(pair)
            for pair in zip(cut(x, n, n + 1 + few), text(num_drafted - few), strict=True)
        ]
        for x, n, few in zip(texts, before, taken, strict=True)
    ]
    second = attend(drafts, verified(slots, [1, 1, 1]))
    rest = [cut(x, -n, None) for x, n in zip(texts, lengths, strict=True)]
    third = attend(rest, verified(slots, [1 + few for few in taken]))
    for n, few in enumerate(taken):
        found = torch.cat([first[n], second[n][: 1 + few], third[n]])
        torch.testing.assert_close(found, expected[n][0], rtol=1e-5, atol=1e-6)


def text(size):
    """Projections of `size` tokens: mixed channels, and two numbers for each head."""
    return torch.randn(size, CHANNELS), torch.randn(size, HEADS), torch.randn(size, HEADS)


def cut(inputs, start, end):
    return [each[start:end] for each in inputs]


def runs(slots):
    """Metadata as vLLM's of requests that begin, without drafts."""
    return {
        "num_prefills": len(slots),
        "non_spec_state_indices_tensor": slots,
        "has_initial_state": torch.zeros(len(slots), dtype=torch.bool),
    }


def verified(slots, accepted):
    """Metadata as vLLM's of drafts, with the number of tokens accepted of each one before."""
    return {
        "num_spec_decodes": len(slots),
        "spec_state_indices_tensor": slots,
        "num_accepted_tokens": torch.tensor(accepted),
    }


def heads_of_vllm(num_slots, num_spec):
    """Linear attention as a function of sequences and vLLM's metadata."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    from engines_on_cpu.vllm_linear_attention import linear_attention

    layer = SimpleNamespace(
        prefix="layer",
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, KERNEL)),
        A_log=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS),
        kv_cache=(
            torch.full((num_slots, KERNEL - 1 + num_spec, CHANNELS), torch.nan),
            torch.full((num_slots, HEADS, SIZE, SIZE), torch.nan),
        ),
        key_dim=KEYS * SIZE,
        value_dim=HEADS * SIZE,
        tp_size=1,
        head_k_dim=SIZE,
        head_v_dim=SIZE,
    )
    layer.rearrange_mixed_qkv = partial(QwenGatedDeltaNetAttention.rearrange_mixed_qkv, layer)

    def attend(sequences, requests):
        inputs = [torch.cat(parts) for parts in zip(*sequences, strict=True)]
        lengths = [len(sequence[0]) for sequence in sequences]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        batch = {"num_decodes": 0, "num_prefills": 0, "num_spec_decodes": 0} | requests
        batch |= {"num_actual_tokens": sum(lengths), "spec_token_indx": torch.arange(sum(lengths))}
        batch |= {"spec_query_start_loc": starts, "non_spec_query_start_loc": starts}
        output = torch.empty(sum(lengths), HEADS, SIZE)
        context = SimpleNamespace(
            no_compile_layers={"layer": layer}, attn_metadata={"layer": SimpleNamespace(**batch)}
        )
        with override_forward_context(context):
            linear_attention(*inputs, output, "layer")
        return output.split(lengths)

    return attend
