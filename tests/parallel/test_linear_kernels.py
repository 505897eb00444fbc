"""Kernels of linear attention: which release; `tests/gpu` compares what they compute."""

from importlib import metadata

import pytest

from parallel.linear_kernels import RELEASE, has_kernels


def test_only_the_release_that_was_read_counts_as_kernels(monkeypatch):
    releases = iter([RELEASE, "0.5.2"])
    monkeypatch.setattr(metadata, "version", lambda name: next(releases))
    assert has_kernels()
    with pytest.raises(ValueError, match=r"fla-core 0.5.2 is installed, .* pip install"):
        has_kernels()
