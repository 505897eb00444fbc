"""What takes long to start, shared by the tests of a session."""

import pytest

from engines import running_engine, served_model


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory):
    """A tiny Qwen3 with tied embeddings that vLLM can serve."""
    return served_model(tmp_path_factory.mktemp("tied"), "qwen3", tied=True)


@pytest.fixture(scope="session")
def vllm_engine(tied_model, tmp_path_factory):
    """A vLLM engine of `tied_model`; push the weights that a test needs before it generates."""
    with running_engine("vllm", tied_model, tmp_path_factory.mktemp("vllm-logs")) as engine:
        yield engine


@pytest.fixture(scope="session")
def transformers_engine(tied_model, tmp_path_factory):
    """The same on the transformers server."""
    logs = tmp_path_factory.mktemp("transformers-logs")
    with running_engine("transformers", tied_model, logs) as engine:
        yield engine
