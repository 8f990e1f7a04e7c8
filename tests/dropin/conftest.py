# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests in the library: its environment with our files in, and the jobs run there.

A start of the library takes ten seconds, so that a launch runs many cases and tests read what each
rank wrote down.
"""

from pathlib import Path

import pytest
from dropin.environment import Environment, dropped_in

__all__ = ["four_ranks", "library", "one_process", "two_ranks"]

JOBS = Path(__file__).with_name("jobs.py")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the library and our files in it."""
    return dropped_in(tmp_path_factory.mktemp("dropin") / "environment")


def _ran(library: Environment, folder: Path, launch: str, *cases: str) -> Path:
    """Run cases and return the folder that they wrote to."""
    done = library.run(*launch.split(), JOBS, folder, *cases)
    assert done.returncode == 0, done.stderr[-8000:]
    return folder


@pytest.fixture(scope="session")
def one_process(library: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what one process came to on all samples."""
    return _ran(library, tmp_path_factory.mktemp("one"), "python", "replicated")


@pytest.fixture(scope="session")
def two_ranks(library: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what two ranks came to."""
    cases = ("older_helpers", "replicated", "fsdp2", "expert_parallel", "starved")
    folder = tmp_path_factory.mktemp("two")
    return _ran(library, folder, "torchrun --nproc-per-node 2", *cases)


@pytest.fixture(scope="session")
def four_ranks(library: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what four ranks came to, two of which share the experts out."""
    folder = tmp_path_factory.mktemp("four")
    return _ran(library, folder, "torchrun --nproc-per-node 4", "expert_parallel", "starved")
