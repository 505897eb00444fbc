"""Kernels of flash-linear-attention against the references in torch, at the sizes of Qwen3-Next
and Nemotron 3 Nano."""

import pytest
import torch
from torch.nn.functional import logsigmoid, pad

from parallel import linear_kernels
from parallel.delta_rule import activated_convolution, gated_delta_rule, stages, unit_heads
from parallel.state_space import state_space

pytestmark = pytest.mark.skipif(
    not linear_kernels.has_kernels(), reason="needs `pip install -e '.[hybrid]'`"
)
PROMPT = 200
"""Tokens of the first run, which the next three continue."""
LENGTHS = (PROMPT, 130, 64, 1, 513)


def packed(*, is_shared):
    cu_seqlens = pad(torch.tensor(LENGTHS, device="cuda").cumsum(0), (1, 0)).int()
    ends = [0, PROMPT, PROMPT, PROMPT, 0]
    prefixes = torch.tensor([[[0, end]] for end in ends], device="cuda") if is_shared else None
    return stages(cu_seqlens, prefixes)


def random(*size, dtype=torch.bfloat16):
    return torch.randn(sum(LENGTHS), *size, device="cuda", dtype=dtype).requires_grad_()


def run(rule, parts):
    """Outputs of a rule, called as rule(inputs of a stage, stage, memories)."""
    outputs, memories = [], None
    for stage in parts:
        before = None if stage.follows is None else memories[stage.follows]
        read, memories = rule(stage, before)
        outputs.append(read)
    return torch.cat(outputs)


def compare(inputs, kernel, reference, parts):
    """Compare outputs and gradients of a kernel with those of a reference in float32."""
    exact = [each.detach().float().requires_grad_() for each in inputs]
    found = run(lambda stage, memory: kernel(inputs, stage, memory), parts)
    wanted = run(lambda stage, memory: reference(exact, stage, memory), parts)
    probe = torch.randn_like(wanted)
    for own, outputs in (inputs, found), (exact, wanted):
        (outputs.float() * probe).sum().backward()
        assert all(each.grad is not None for each in own)
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))]
    for got, want in pairs:  # bfloat16 numbers are 0.4% apart
        assert (got.float() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_gated_delta_rule_equals_the_reference(is_shared):
    torch.manual_seed(0)
    query, key, value = random(16, 128), random(16, 128), random(32, 128)
    rates = [random(32, dtype=torch.float32) for _ in range(2)]

    def stage_inputs(inputs, stage):
        *heads, decay, strength = (each[stage.tokens] for each in inputs)
        return *heads, logsigmoid(decay), strength.sigmoid()

    def kernel(inputs, stage, memory):
        return linear_kernels.gated_delta_rule(*stage_inputs(inputs, stage), stage, memory)

    def reference(inputs, stage, memory):
        query, key, *others = stage_inputs(inputs, stage)
        query, key = (unit_heads(x).repeat_interleave(2, dim=1) for x in (query, key))
        return gated_delta_rule(query, key, *others, stage.chunks, memory)

    compare([query, key, value, *rates], kernel, reference, packed(is_shared=is_shared))


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_state_space_model_equals_the_reference(is_shared):
    torch.manual_seed(0)
    query, key, value = random(8, 128), random(8, 128), random(64, 64)

    def stage_inputs(inputs, stage):
        *heads, decay = (each[stage.tokens] for each in inputs)
        return *heads, logsigmoid(decay)

    def kernel(inputs, stage, memory):
        return linear_kernels.state_space(*stage_inputs(inputs, stage), stage, memory)

    def reference(inputs, stage, memory):
        return state_space(*stage_inputs(inputs, stage), stage.chunks, memory)

    inputs = [query, key, value, random(64, dtype=torch.float32)]
    compare(inputs, kernel, reference, packed(is_shared=is_shared))


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_equals_the_reference(has_bias):
    torch.manual_seed(0)
    channels, (begins, follows) = 8192, packed(is_shared=True)
    x = random(channels)
    weight = torch.randn(channels, 4, device="cuda").requires_grad_()
    bias = torch.randn(channels, device="cuda").requires_grad_() if has_bias else None
    before = torch.randn(3, 3, channels, device="cuda", dtype=x.dtype).requires_grad_()
    inputs = [x, weight, before, *([bias] if has_bias else [])]
    exact = [each.detach().float().requires_grad_() for each in inputs]

    def mixed(convolution, own):
        x, weight, before, *bias = own
        nothing = before.new_zeros(2, 3, channels)
        parts = (begins, nothing), (follows, before)
        return torch.cat(
            [convolution(x[s.tokens], weight, s, b, *(bias or [None])) for s, b in parts]
        )

    found = mixed(linear_kernels.convolution, inputs)
    wanted = mixed(activated_convolution, exact)
    probe = torch.randn_like(wanted)
    (found.float() * probe).sum().backward()
    (wanted * probe).sum().backward()
    for got, want in [
        (found, wanted),
        *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)),
    ]:
        assert (got.float() - want).norm() < 0.02 * want.norm()
