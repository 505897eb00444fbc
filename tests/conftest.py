"""Fixtures of several folders, mostly slow to start and shared by a session; marks by folder."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from helpers.engines.live import SGLANG_PYTHON, running_engine, served_model
from helpers.pushes.trainers import trainer
from helpers.ranks.processes import CONTEXT
from helpers.runs.in_flight import make_in_flight_runs
from helpers.runs.jobs import make_runs

# No deadline: on a busy machine the duration of an example means nothing.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")


FOLDERS = {
    "megatron_grpo/algorithm": ["fast"],
    "megatron_grpo/batch": ["fast"],
    "megatron_grpo/checkpoints": ["fast", "fault"],
    "megatron_grpo/data": ["fast"],
    "megatron_grpo/reporting": ["fast"],
    "megatron_grpo/rewards": ["waits"],
    "megatron_grpo/rollout": ["fast"],
    "megatron_grpo/watchdog": ["timed"],
    "checkpoint_convert/formats": ["fast"],
    "gpu": ["gpu"],
    "parallel": ["fast"],
    "sglang": ["engines", "both_engines"],
}
"""Marks of all tests in a folder; files add their own."""
LONG = {"live_engine", "reference_engine", "engine"}
"""Fixtures of long tests."""


def pytest_addoption(parser):
    parser.addoption("--engine", choices=["vllm", "sglang"], default="vllm", help="which is tested")


def pytest_itemcollected(item):
    for folder, marks in FOLDERS.items():
        if item.nodeid.startswith(f"tests/{folder}/"):
            for mark in marks:
                item.add_marker(mark)
            if "gpu" in marks:
                item.add_marker(pytest.mark.timeout(900))  # kernels and vLLM compile
                item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))


def pytest_collection_modifyitems(config, items):
    """Put files with long tests first, so that no worker ends with one of them alone.

    pytest-xdist keeps this order with `--no-loadscope-reorder`. With `--engine`, tests that do not
    use such an engine are left out, since they would run as without the option.
    """
    if (kind := config.getoption("--engine")) != "vllm":
        config.hook.pytest_deselected(items=[item for item in items if not _starts(item, kind)])
        items[:] = [item for item in items if _starts(item, kind)]
    files = {item.path for item in items if LONG & {*item.fixturenames}}
    items.sort(key=lambda item: item.path not in files)


def _starts(item, kind):
    """Whether a test uses an engine of `kind`, by its folder, its fixtures, or its parameters."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {name for name in given if isinstance(name, str)}
    if "reference_engine" in names:
        return False
    is_named = kind in names or any(name.endswith("_engine") for name in names)
    in_folder = item.nodeid.startswith(f"tests/{kind}/")
    return is_named or in_folder or "engine_kind" in item.fixturenames


@pytest.fixture(scope="session")
def elsewhere():
    """Call a function in a separate process, where the CPU may pose as CUDA for good."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=200)


@pytest.fixture(scope="module")
def alone():
    """A process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(alone):
    """The mesh of this process as its only rank."""
    from parallel import ParallelDims
    from parallel.groups import destroy_groups, init_groups

    yield init_groups(ParallelDims())
    destroy_groups()


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory):
    """A tiny Qwen3 with tied embeddings that vLLM can serve."""
    return served_model(tmp_path_factory.mktemp("tied"), "qwen3", tied=True)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """`tied_model` with other weights."""
    return served_model(tmp_path_factory.mktemp("other"), "qwen3", tied=True, seed=1)


@pytest.fixture(scope="session")
def engine_kind(request):
    """The kind and interpreter of the engine that `running_engine` starts."""
    name = request.config.getoption("--engine")
    return {"engine": name, "python": SGLANG_PYTHON if name == "sglang" else None}


@pytest.fixture(scope="session")
def live_engine(engine_kind, tied_model, tmp_path_factory):
    """An engine of `tied_model`, vLLM or that of `--engine`; push weights before generating."""
    options = {"log_dir": tmp_path_factory.mktemp("engine-logs"), "tool_call_parser": "hermes"}
    with running_engine(folder=tied_model, **options, **engine_kind) as engine:
        yield engine


@pytest.fixture
def seeds(engine_kind):
    """Skip tests of a request's seed where the engine has none."""
    if engine_kind["engine"] == "sglang":
        pytest.skip("SGLang follows seeds on GPUs only, with enable_deterministic_inference")


@pytest.fixture(scope="session")
def reference_engine(tied_model, tmp_path_factory):
    """An engine of tests/reference_engine with `tied_model`; push weights before generating."""
    logs = tmp_path_factory.mktemp("reference-logs")
    with running_engine("reference", tied_model, logs) as engine:
        yield engine


@pytest.fixture(scope="session")
def pair(tied_model, tmp_path_factory):
    """A trainer and two reference engines with a short stall time-out; every test must leave both
    serving."""
    logs, limits = tmp_path_factory.mktemp("pair"), {"health_timeout": 3.0, "stall_timeout": 3.0}
    with (
        running_engine("reference", tied_model, logs, num_engines=2, **limits) as engines,
        trainer(tied_model, engines.servers, engines.rollout) as ours,
    ):
        ours.push()
        yield ours


@pytest.fixture(params=["live_engine", "reference_engine"])
def engine(request, tied_model):
    """The live and the reference engine in turn, with the weights of `tied_model`."""
    engine = request.getfixturevalue(request.param)
    engine.push(tied_model)
    return engine


@pytest.fixture(scope="session")
def runs(tied_model, live_engine, tmp_path_factory):
    """Runs of one config, for tests that break them."""
    return make_runs(tied_model, live_engine, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def in_flight_runs(tied_model, live_engine, tmp_path_factory):
    """Runs with pushes while completions are in progress."""
    return make_in_flight_runs(tied_model, live_engine, tmp_path_factory.mktemp("in_flight"))


@pytest.fixture(scope="session")
def undisturbed(runs):
    """The run directory of an undisturbed run."""
    run_dir = runs.folder / "undisturbed"
    runs.finish(run_dir)
    return run_dir
