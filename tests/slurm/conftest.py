"""One Slurm cluster for all tests of its scripts."""

from functools import partial

import pytest

from helpers.runs.slurm_cluster import running_cluster
from helpers.runs.slurm_jobs import submitter


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tied_model, tmp_path):
    with submitter(cluster, tied_model) as submit:
        yield partial(submit, folder=tmp_path)
