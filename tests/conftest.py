# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from _test_utils.torch.distributed.utils import (
    DistributedWorkerPool,
    cpu_dist_workers,
    launch_environment,
)

__all__ = ["cpu_dist_workers", "fail_on_distributed_leaks", "four_ranks", "launch_port"]


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[DistributedWorkerPool]:
    """Run jobs on four gloo ranks; tests that do are of the xdist group "four_ranks"."""
    pool = DistributedWorkerPool(4, backend="gloo")
    yield pool
    pool.shutdown()


@pytest.fixture(autouse=True)
def fail_on_distributed_leaks() -> Iterator[None]:
    """Fail a test that leaves a process group or launch variables in the pytest process."""
    before = launch_environment()
    yield
    after = launch_environment()
    leaks = sorted(n for n in before | after if before.get(n) != after.get(n))
    # Put right first, so that a leak fails one test and not those after it.
    for name in leaks:
        os.environ.pop(name, None)
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("the default process group")
    if leaks:
        pytest.fail(f"The pytest process must be left as it was; leaked: {', '.join(leaks)}")


@pytest.fixture
def launch_port() -> Iterator[int]:
    """Serve a launch's store, as torchrun's agent does, on a port that is bound already."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store
