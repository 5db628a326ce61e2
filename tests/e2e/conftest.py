"""The cluster of the modules that measure on Ray; those that look at its start or its nodes start their own."""

from collections.abc import Iterator

import pytest
from ray_clusters import Cluster, running_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with running_cluster(cpus=2, gpus=2, card="A100") as found:
        yield found
