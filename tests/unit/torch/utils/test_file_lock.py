# SPDX-License-Identifier: Apache-2.0
"""One process of a node does a job once."""

import threading
import time
from pathlib import Path

import pytest
from _test_utils.torch.distributed.utils import DistributedWorkerPool

import modelopt.torch.utils.distributed as mdist
from modelopt.torch.utils.distributed import FileLock


def test_second_lock_does_not_acquire_and_does_not_remove(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as first:
        assert path.exists()
        with FileLock(str(path)) as second:
            assert not second.try_acquire()
        second.release()
        assert path.exists()
        assert not first.try_acquire()
    assert not path.exists()
    assert second.try_acquire()
    second.release()
    assert not path.exists()


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), FileLock(tmp_path / "lock"):
        raise ValueError("boom")
    assert not (tmp_path / "lock").exists()


def test_wait_polls_until_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    threading.Timer(0.3, path.unlink).start()
    start = time.monotonic()
    FileLock(path, poll_time=0.01).wait()
    assert 0.25 < time.monotonic() - start < 5


def test_wait_sleeps_poll_time_between_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        path.unlink()

    monkeypatch.setattr(time, "sleep", sleep)
    FileLock(path, poll_time=7).wait()
    assert slept == [7]


def test_file_that_stays_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(mdist, "_LOCK_WAIT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="Remove it"), FileLock(path, True, poll_time=0.01):
        pass
    assert path.exists()


def _take_turns(rank: int, size: int, folder: str) -> None:
    for _ in range(20):
        with FileLock(f"{folder}/lock", all_acquire=True, poll_time=0.001):
            inside = Path(folder, "inside")
            inside.mkdir()  # it would exist while the other rank is inside
            time.sleep(0.001)
            inside.rmdir()


def test_all_acquire_gives_every_rank_its_turn(
    cpu_dist_workers: DistributedWorkerPool, tmp_path: Path
) -> None:
    cpu_dist_workers.run(_take_turns, str(tmp_path))
    assert not list(tmp_path.iterdir())
