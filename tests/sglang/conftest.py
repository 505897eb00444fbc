import pytest

from helpers.engines.live import SGLANG_PYTHON


@pytest.fixture(autouse=True)
def sglang():
    if not SGLANG_PYTHON.exists():
        pytest.skip(f"{SGLANG_PYTHON} is made by `make setup-sglang`")
