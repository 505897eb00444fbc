import pytest

from helpers.engines.vllm_workers import NUM_ENGINES, worker_engines


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids="TP{}".format
)
def engines(request, tmp_path_factory):
    """Tensor-parallel size of the engines, and their workers."""
    folder = tmp_path_factory.mktemp("sockets")
    with worker_engines(NUM_ENGINES, request.param, folder, timeout=900) as engines:
        yield request.param, engines
