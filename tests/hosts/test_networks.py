"""Runs over hosts with two engines and slow networks."""

from contextlib import ExitStack

import pytest

from helpers.engines.live import served_model
from helpers.runs.host_runs import BOTH_ENGINES, ENGINES, finish, serve, start
from helpers.runs.hosts import can_make_hosts
from helpers.runs.in_flight import check_run
from helpers.runs.jobs import assert_same_run
from helpers.runs.networks import distant, slow
from helpers.runs.train import read_metrics

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]


def test_adapters_reach_two_engines_with_the_bits_of_one_host(hosts, given, tmp_path):
    adapters = ["lora.r=4", "lora.sync=merged", BOTH_ENGINES]
    for number in (1, 2):
        finish(given, tmp_path / f"{number}", hosts[:number], *adapters, axes=["data"])
    assert_same_run(tmp_path / "2", tmp_path / "1")


def test_tokens_sampled_during_pushes_are_no_older_than_allowed(hosts, given, tmp_path):
    """Engines on two hosts generate while the ranks of two others train and push."""
    in_flight = ["rollout.in_flight_updates=true", "rollout.max_staleness=1"]
    in_flight += ["grpo.rollout_importance_sampling_mode=token_truncate", BOTH_ENGINES]
    in_flight += ["grpo.steps_per_generation=1", "rollout.max_completion_length=200"]
    # Without checkpoints, a step takes a third of the time of a generation: most meet a push.
    in_flight += ["train.num_steps=8", "train.save_interval=8"]
    finish(given, tmp_path / "run", hosts[:2], *in_flight, axes=["data"])
    check_run(tmp_path / "run", num_steps=8, max_staleness=1)
    records = read_metrics(tmp_path / "run")
    assert {record["rollout/num_engines"] for record in records} == {2}
    assert any(record["rollout/mixed_versions_frac"] for record in records)


def test_slow_networks_change_no_bit(hosts, given, tmp_path):
    """Two runs at the same time: one of 3 million parameters with 50 Mbit/s, and a tiny one with
    100 ms from host to host and back, where one packet in a hundred is lost."""
    alpha, beta, gamma, delta, second, engine = hosts
    given = [*given, "train.num_steps=2", "grpo.steps_per_generation=1"]
    model = served_model(tmp_path / "model", "qwen3", tied=True, intermediate_size=8192)
    wide = [*given, f"model.path={model}", "rollout.base_urls=[http://engine:8001]"]
    serve(wide, engine, port=8001, log_dir=tmp_path)
    runs = {"slow": (wide, [alpha, beta]), "far": ([*given, ENGINES[1]], [gamma, delta])}
    for name, (arguments, ranks) in runs.items():
        finish(arguments, tmp_path / f"{name}_one", ranks[:1], axes=["data"])
    with ExitStack() as stack:
        stack.enter_context(slow([alpha, beta, engine], "50mbit"))
        stack.enter_context(distant([delta, second], seconds=0.05, loss=0.01))
        jobs = [
            stack.enter_context(start(arguments, tmp_path / name, ranks, axes=["data"]))
            for name, (arguments, ranks) in runs.items()
        ]
        all_ended = [job.end(90) for job in jobs]
    for name, ended in zip(runs, all_ended, strict=True):
        assert not any(ended.exit_codes), ended.output
        assert "is lost" not in ended.output
        assert_same_run(tmp_path / name, tmp_path / f"{name}_one")
        # The network is slow: a tenth of a second otherwise.
        assert min(record["time/train"] for record in read_metrics(tmp_path / name)) > 1
