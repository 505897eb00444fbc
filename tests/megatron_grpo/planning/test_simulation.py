"""Simulated training with generations ahead, against what can be computed by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_grpo.planning.simulation import MODES, Engine, Loop, Mode, drawn, simulate

SYNCHRONOUS, AHEAD, *IN_FLIGHT = MODES


def constant(running: int) -> float:
    return 0.01


def loop(**given) -> Loop:
    """Two engines with four of eight equal completions each, 1.0 s for a generation."""
    settings = {
        "lengths": [100],
        "batch": 8,
        "num_engines": 2,
        "at_once": 1000,
        "pass_seconds": lambda running: 0.0025 * running,
        "prompt_seconds": 0.0,
        "token_seconds": 0.0,
        "start_seconds": 0.0,
        "train_seconds": 0.4,
        "push_seconds": 0.1,
    }
    return Loop(**settings | given)


def heavy_tail(**given) -> Loop:
    """Few completions take most of the time; the trainer is as busy as the engines."""
    source = random.Random(0)
    lengths = [min(1024, 1 + int(source.lognormvariate(3.5, 1.2))) for _ in range(1000)]
    rates = {"pass_seconds": lambda running: 0.002 + 0.0002 * running, "train_seconds": 0.8}
    return loop(lengths=lengths, batch=64, **rates | given)


@pytest.mark.parametrize("train", [0.4, 3.0])
def test_equal_completions_take_the_sum_or_the_maximum_of_both_sides(train):
    job = loop(train_seconds=train)
    one_after_another = simulate(job, SYNCHRONOUS)
    assert one_after_another.seconds == pytest.approx(1.0 + train + 0.1)
    assert one_after_another.engines_busy == pytest.approx(1.0 / (1.1 + train))
    assert one_after_another.trainer_busy == pytest.approx(train / (1.1 + train))
    assert one_after_another.tokens_per_second == pytest.approx(800 / (1.1 + train))
    for mode in (AHEAD, IN_FLIGHT[0]):
        assert simulate(job, mode).seconds == pytest.approx(max(1.0, train) + 0.1)
    drained = simulate(job, AHEAD)
    assert (drained.staleness_mean, drained.staleness_max) == (pytest.approx(1), 1)


def test_seconds_of_a_pass_depend_on_the_running_requests():
    # One completion of 100 tokens and one of 300: 100 passes of both, then 200 of one.
    engine = Engine(loop(pass_seconds=lambda running: 0.01 * running))
    engine.request(5.0, 0, [100, 300])
    assert engine.finish(0) == pytest.approx(5.0 + 100 * 0.02 + 200 * 0.01)
    assert engine.busy == pytest.approx(4.0)


def test_ranks_that_train_slow_an_engine_down_and_requests_hold_up_one_that_computes():
    costs = {"slowdown": 1.5, "start_seconds": 0.2, "receive_seconds": 0.1}
    engine = Engine(loop(pass_seconds=constant, **costs))
    engine.request(0.0, 0, [100])
    engine.run(0.95, trains=True)  # the start, and 50 passes
    engine.request(0.95, 1, [20, 20])
    assert engine.finish(0) == pytest.approx(0.95 + 2 * 0.1 + 0.5)
    # Training takes 0.4 s at half the speed: it leaves 0.8 of a second's passes undone.
    assert simulate(loop(slowdown=2.0), AHEAD).seconds == pytest.approx(0.4 + 0.8 + 0.1)


def test_requests_beyond_an_engines_room_wait():
    assert simulate(loop(at_once=1, pass_seconds=constant), SYNCHRONOUS).seconds == pytest.approx(
        4 * 1.0 + 0.5
    )
    assert simulate(loop(prompt_seconds=0.05), SYNCHRONOUS).seconds == pytest.approx(1.7)


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_push_in_flight_recomputes_sampled_tokens_unless_caches_are_kept(recomputes):
    costs = {"token_seconds": 0.001, "prompt_seconds": 0.2, "start_seconds": 0.3}
    engine = Engine(loop(pass_seconds=constant, recomputes=recomputes, **costs))
    engine.request(0.0, 0, [100, 100])
    engine.run(1.2)  # the start, two prompts, and 50 passes
    engine.push(1.2, 1)
    anew = recomputes * 2 * (0.2 + 50 * 0.001)
    assert engine.finish(0) == pytest.approx(1.2 + 0.1 + anew + 0.5)
    assert engine.busy == pytest.approx(2 * 0.2 + anew + 1.0)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("at_once", [4, 1000])
def test_every_completion_ends_once_and_no_token_is_older_than_the_bound(mode, at_once):
    job = heavy_tail(at_once=at_once, train_seconds=0.3)
    forecast = simulate(job, mode, 20)
    first = mode.max_staleness + 2
    tokens = sum(sum(drawn(job, generation)) for generation in range(first, first + 20))
    assert forecast.tokens_per_second * 20 * forecast.seconds == pytest.approx(tokens)
    assert forecast.staleness_mean <= forecast.staleness_max <= mode.max_staleness
    assert forecast == simulate(job, mode, 20)


def test_tokens_are_as_old_as_the_number_of_pushes_between():
    # Training takes no time, and a push comes after each second.
    engine = Engine(loop(pass_seconds=constant))
    engine.request(0.0, 3, [300])
    for version in (1, 2, 3):
        engine.run(engine.clock + 0.8)
        engine.push(engine.clock, version)
    engine.finish(3)
    assert engine.max_staleness[3] == 3
    assert engine.staleness[3] == pytest.approx(80 * 3 + 80 * 2 + 80 * 1 + 60 * 0)


def test_with_a_heavy_tail_no_bound_is_slower_than_a_smaller_one():
    seconds = [simulate(heavy_tail(), mode, 64).seconds for mode in (SYNCHRONOUS, *IN_FLIGHT)]
    for slower, faster in pairwise(seconds):
        assert faster <= slower * (1 + 1e-9)
    assert seconds[0] > 1.5 * seconds[3]
    with_work = replace(heavy_tail(), token_seconds=1e-3)
    assert simulate(with_work, Mode(max_staleness=1, in_flight=True)).seconds > seconds[1]
