# SPDX-License-Identifier: Apache-2.0
"""The test support itself: a job may do anything to its ranks, and the next job finds them well."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _test_utils.torch.distributed import utils
from _test_utils.torch.distributed.utils import DistributedWorkerPool, bounded_collectives

_TESTS = Path(utils.__file__).parents[3]
# Far beyond what any of these jobs takes, and far below the timeouts that would end a hang.
_SOON_SECONDS = 15.0


def _log_teardown(log: Path) -> None:
    with log.open("a") as file:
        file.write(f"{os.getpid()} {dist.is_initialized()}\n")


@pytest.fixture(scope="module")
def teardown_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file to which each teardown of `pool` adds its pid and if it had a group."""
    return tmp_path_factory.mktemp("pool") / "teardown.log"


@pytest.fixture(scope="module")
def pool(teardown_log: Path) -> Iterator[DistributedWorkerPool]:
    """Return a pool of this module's own, since it loses ranks again and again."""
    pool = DistributedWorkerPool(2, "gloo", functools.partial(_log_teardown, teardown_log))
    pool.peer_grace_seconds = 2.0
    yield pool
    pool.shutdown()


def _all_reduced_pid(rank: int, size: int) -> int:
    """One healthy collective of the default group, and who took part."""
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == size * (size + 1) / 2
    assert dist.get_world_size() == size
    assert dist.get_rank() == rank
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return os.getpid()


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie, which nobody waited for, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + _SOON_SECONDS
    while time.monotonic() < deadline and not all(map(_is_gone, pids)):
        time.sleep(0.05)
    return all(map(_is_gone, pids))


def _failure(pool: DistributedWorkerPool, fn: Callable[..., Any]) -> str:
    """The report of a job that fails soon, after a healthy one and before another."""
    before = pool.run(_all_reduced_pid)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        pool.run(fn)
    assert time.monotonic() - start < _SOON_SECONDS
    assert _all_gone(before)
    assert len(set(before + pool.run(_all_reduced_pid))) == 2 * pool.world_size
    return str(failure.value)


# ------------------------------------------------------------------------------------------ Jobs


def _add(rank: int, size: int, first: int, second: int = 0) -> tuple[int, int, int]:
    return rank, size, first + second


def test_run_returns_values_in_rank_order(cpu_dist_workers: DistributedWorkerPool) -> None:
    assert cpu_dist_workers.run(_add, 2, second=3) == [(0, 2, 5), (1, 2, 5)]
    job = functools.partial(_add, second=4)
    assert cpu_dist_workers.run(job, 2) == [(0, 2, 6), (1, 2, 6)]


def test_run_keeps_ranks_and_their_group(pool: DistributedWorkerPool) -> None:
    first = pool.run(_all_reduced_pid)
    assert pool.run(_all_reduced_pid) == first
    assert os.getpid() not in first


def _start_a_child(rank: int, size: int) -> int | None:
    # Not forked: a copy of a rank whose threads hold locks may wait for them forever.
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    return child.exitcode


def test_run_allows_a_job_child_processes(cpu_dist_workers: DistributedWorkerPool) -> None:
    assert cpu_dist_workers.run(_start_a_child) == [0, 0]


def test_run_imports_from_paths_that_are_new(
    cpu_dist_workers: DistributedWorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_dist_workers.run(_all_reduced_pid)
    (tmp_path / "late_job_module.py").write_text("def job(rank, size):\n    return rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    import late_job_module  # type: ignore[import-not-found]

    assert cpu_dist_workers.run(late_job_module.job) == [0, 1]


def test_run_refuses_what_does_not_pickle(pool: DistributedWorkerPool) -> None:
    before = pool.run(_all_reduced_pid)
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda *_: None)
    assert pool.run(_all_reduced_pid) == before


# ---------------------------------------------------------------------------- Jobs that go wrong


class _UnloadableError(Exception):
    """An error that pickles and does not load: it takes two arguments and pickles one."""

    def __init__(self, shape: str, size: int) -> None:
        super().__init__(f"no such {shape} of {size}")


def _exit_or_return_a_lock(rank: int, size: int) -> Any:
    return sys.exit(0) if rank == 0 else threading.Lock()


def _interrupt_or_return_an_unloadable(rank: int, size: int) -> Exception:
    if rank == 0:
        raise KeyboardInterrupt
    return _UnloadableError("shape", 3)


@pytest.mark.parametrize(
    ("fn", "of_rank_0", "of_rank_1"),
    [
        (_exit_or_return_a_lock, "SystemExit: 0", "cannot pickle"),
        (_interrupt_or_return_an_unloadable, "KeyboardInterrupt", "returned what does not load"),
    ],
)
def test_run_raises_every_failing_ranks_traceback(
    pool: DistributedWorkerPool, fn: Callable[..., Any], of_rank_0: str, of_rank_1: str
) -> None:
    summary, _, tracebacks = _failure(pool, fn).partition("\n")
    assert summary == f"Job {fn.__name__} failed on rank 0, 1 of 2 ranks."
    assert of_rank_0 in tracebacks.partition("Rank 1 ")[0]
    assert of_rank_1 in tracebacks.partition("Rank 1 ")[2]


def _die_beside_a_barrier(rank: int, size: int) -> None:
    if rank == 0:
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_run_reports_a_rank_that_dies(pool: DistributedWorkerPool) -> None:
    report = _failure(pool, _die_beside_a_barrier)
    assert "Rank 1 died with exit code -9." in report
    # Its peer tells where it was: by its own error, or else by its stack.
    assert "_die_beside_a_barrier" in report.partition("Rank 0")[2].partition("Rank 1")[0]


def _fork_a_child() -> None:
    """Leave a process that holds what this rank holds: its pipes to the pool stay open."""
    if os.fork() == 0:
        time.sleep(_SOON_SECONDS + 5)
        os._exit(0)


def _exit_and_leave_a_child(rank: int, size: int) -> None:
    if rank == 1:
        _fork_a_child()
        os._exit(7)


@pytest.mark.slow
def test_run_reports_a_rank_that_dies_and_leaves_a_child(pool: DistributedWorkerPool) -> None:
    report = _failure(pool, _exit_and_leave_a_child)
    assert "failed on rank 1 of 2 ranks.\nRank 0 returned.\nRank 1 died with exit code 7." in report


def _sleep_for_good() -> None:
    time.sleep(1000)


def _hang(rank: int, size: int) -> None:
    if rank == 0:
        dist.barrier()
    _fork_a_child()
    _sleep_for_good()


@pytest.mark.slow
def test_run_reports_a_hang_with_every_stack(
    pool: DistributedWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "job_timeout_seconds", 2.0)
    of_rank_0, _, of_rank_1 = _failure(pool, _hang).partition("Rank 1 ")
    assert "was still running after 2." in of_rank_0
    assert "in barrier" in of_rank_0
    assert "was still running after 2." in of_rank_1
    assert "in _sleep_for_good" in of_rank_1


def _fail_beside_a_hang(rank: int, size: int) -> None:
    if rank == 1:
        raise _UnloadableError("shape", 3)
    _sleep_for_good()


@pytest.mark.slow
def test_run_gives_peers_of_a_failure_a_short_grace(pool: DistributedWorkerPool) -> None:
    report = _failure(pool, _fail_beside_a_hang)
    assert "_UnloadableError: no such shape of 3" in report
    assert "Rank 0 was still running after 2." in report
    assert "in _sleep_for_good" in report


def _launch_and_threads(rank: int, size: int) -> tuple[dict[str, str], int]:
    return utils.launch_environment(), torch.get_num_threads()


def test_run_replaces_a_rank_that_died_between_jobs(
    pool: DistributedWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pool.run(_all_reduced_pid)
    os.kill(before[1], signal.SIGKILL)
    assert _all_gone(before[1:])
    # A launch that a test stands in for must not reach ranks that start meanwhile.
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert pool.run(_launch_and_threads) == [({}, 1)] * 2
    assert not set(before) & set(pool.run(_all_reduced_pid))
    assert _all_gone(before)


@pytest.mark.slow
def test_run_interrupted_leaves_no_answer_to_the_next_job(
    pool: DistributedWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pool.run(_all_reduced_pid)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(utils, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(_add, 1)
    assert not set(before) & set(pool.run(_all_reduced_pid))
    assert _all_gone(before)


# ------------------------------------------------------------------------- What a job leaves behind


def _change_environment(rank: int, size: int) -> None:
    os.environ["RANK"] = "5"
    os.environ["HOME"] = "/nowhere"
    del os.environ["PATH"]


def _environment(rank: int, size: int) -> dict[str, str]:
    return dict(os.environ)


def test_run_puts_environment_variables_back(pool: DistributedWorkerPool) -> None:
    before = pool.run(_environment)
    pool.run(_change_environment)
    assert pool.run(_environment) == before


def _destroy_the_group(rank: int, size: int) -> None:
    dist.destroy_process_group()


def _destroy_it_on_one_rank(rank: int, size: int) -> None:
    if rank == 1:
        dist.destroy_process_group()


def _replace_the_group(rank: int, size: int, store: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def _leave_a_group(rank: int, size: int) -> None:
    dist.new_group([0])


@pytest.mark.parametrize(
    "fn", [_destroy_the_group, _destroy_it_on_one_rank, _replace_the_group, _leave_a_group]
)
def test_run_gives_the_next_job_a_group_of_its_own(
    pool: DistributedWorkerPool, teardown_log: Path, tmp_path: Path, fn: Callable[..., None]
) -> None:
    before = pool.run(_all_reduced_pid)
    teardown_log.unlink(missing_ok=True)
    pool.run(fn, *([str(tmp_path / "store")] if fn is _replace_the_group else []))
    # The same processes: new ones would cost seconds.
    assert pool.run(_all_reduced_pid) == before
    # A teardown knows state that refers to the old groups, so it runs before they are replaced.
    torn_down = [int(line.split()[0]) for line in teardown_log.read_text().splitlines()]
    assert sorted(torn_down) == sorted(before)


def _leave_a_collective_unfinished(rank: int, size: int) -> None:
    if rank == 0:
        dist.barrier(async_op=True)


@pytest.mark.slow
def test_run_replaces_ranks_that_are_out_of_step(pool: DistributedWorkerPool) -> None:
    before = pool.run(_all_reduced_pid)
    pool.run(_leave_a_collective_unfinished)
    start = time.monotonic()
    assert not set(before) & set(pool.run(_all_reduced_pid))
    assert time.monotonic() - start < pool.group_timeout_seconds


# ----------------------------------------------------------------------------- The pool's own life


def test_shutdown_tears_down_and_ends_every_rank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = DistributedWorkerPool(1, "gloo", functools.partial(_log_teardown, log))
    pids = pool.run(_all_reduced_pid)
    pool.shutdown()
    pool.shutdown()
    assert log.read_text() == f"{pids[0]} True\n"
    assert all(map(_is_gone, pids))
    with pytest.raises(RuntimeError, match="shut down"):
        pool.run(_all_reduced_pid)


def _fail_teardown() -> None:
    raise OSError("no such state")


@pytest.mark.slow
def test_shutdown_reports_a_teardown_that_fails() -> None:
    pool = DistributedWorkerPool(1, "gloo", _fail_teardown)
    pids = pool.run(_all_reduced_pid)
    with pytest.raises(RuntimeError, match=r"(?s)Teardown failed on rank 0.*no such state"):
        pool.shutdown()
    assert all(map(_is_gone, pids))


_SCRIPT = """
import os, sys, threading, time
from _test_utils.torch.distributed.utils import DistributedWorkerPool

def pid(rank, size):
    return os.getpid()

def hang(rank, size):
    time.sleep(1000)

if __name__ == "__main__":
    pool = DistributedWorkerPool(1, "gloo")
    print(*pool.run(pid), flush=True)
    if sys.argv[1] == "killed":
        threading.Timer(1, os.kill, (os.getpid(), 9)).start()
        pool.run(hang)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("exits", 0)])
def test_ranks_end_with_the_pools_process(tmp_path: Path, how: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(_TESTS), "TMPDIR": str(tmp_path)}
    # Not `capture_output`: a rank that lived on would hold the pipe open.
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, str(script), how]
        done = subprocess.run(command, env=environment, stdout=out, timeout=60, check=False)
    pids = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert done.returncode == code
    assert len(pids) == 1
    assert _all_gone(pids)


def test_world_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        DistributedWorkerPool(0, "gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_run_reports_a_group_that_cannot_be_set_up() -> None:
    pool = DistributedWorkerPool(1)
    with pytest.raises(RuntimeError, match=r"(?s)Setting up.*rank 0 of 1.*set_device"):
        pool.run(_all_reduced_pid)
    pool.shutdown()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("nccl", ["device 1", "init nccl"]),
        ("cpu:gloo,cuda:nccl", ["device 1", "init cpu:gloo,cuda:nccl"]),
        ("gloo", ["init gloo"]),
    ],
)
def test_set_up_binds_the_ranks_device_first(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"device {device}"))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: calls.append(f"init {name}"))
    utils._set_up(
        1, 2, backend=backend, rendezvous="file://none", timeout=timedelta(1), teardown_fn=None
    )
    assert calls == expected


# ----------------------------------------------------------------------------- Bounded collectives


def _one_sided(name: str, size: int, **group: Any) -> None:
    """Rank 0's part of a collective that its peers stay away from."""
    objects: list[Any] = [None] * size
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather_object": (objects, 0),
        "barrier": (),
        "broadcast_object_list": (objects, 1),
        "gather_object": (0, objects),
        "scatter_object_list": ([None], objects),
    }
    getattr(dist, name)(*arguments[name], **group)


def _strand_rank_0(rank: int, size: int, name: str, group: str) -> None:
    named: dict[str, Any] = {} if group == "unnamed" else {"group": None}
    if group == "default":
        named["group"] = dist.group.WORLD
    original = getattr(dist, name)
    with bounded_collectives(timedelta(seconds=0.3)):
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
                _one_sided(name, size, **named)
            assert time.monotonic() - start < 2
        else:
            time.sleep(0.8)
    assert getattr(dist, name) is original
    _all_reduced_pid(rank, size)


@pytest.mark.parametrize("group", ["unnamed", "None", "default"])
@pytest.mark.parametrize("name", ["all_gather_object", "barrier"])
def test_bounded_collectives_end_a_collective_of_the_default_group(
    cpu_dist_workers: DistributedWorkerPool, name: str, group: str
) -> None:
    cpu_dist_workers.run(_strand_rank_0, name, group)


@pytest.mark.parametrize("name", ["broadcast_object_list", "gather_object", "scatter_object_list"])
def test_bounded_collectives_end_every_object_collective(
    cpu_dist_workers: DistributedWorkerPool, name: str
) -> None:
    cpu_dist_workers.run(_strand_rank_0, name, "unnamed")


def _leave_rank_0(rank: int, size: int) -> None:
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError), bounded_collectives():
            dist.barrier()
    else:
        with pytest.raises(ValueError, match="left"), bounded_collectives():
            raise ValueError("left")
    assert time.monotonic() - start < 5
    _all_reduced_pid(rank, size)


def test_bounded_collectives_fail_at_once_when_a_peer_leaves(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_leave_rank_0)


def _exchange_objects(rank: int, size: int) -> list[Any]:
    with bounded_collectives(), bounded_collectives():
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, rank)
        sent: list[Any] = ["from 1" if rank == 1 else None]
        dist.broadcast_object_list(sent, group_src=1)
        collected: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(rank, collected, dst=0)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [10, 11] if rank == 1 else None, 1)
        dist.barrier()
    _all_reduced_pid(rank, size)
    return [gathered, sent, collected, scattered]


def test_bounded_collectives_give_the_default_groups_results(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    before = cpu_dist_workers.run(_all_reduced_pid)
    assert cpu_dist_workers.run(_exchange_objects) == [
        [[0, 1], ["from 1"], [0, 1], [10]],
        [[0, 1], ["from 1"], None, [11]],
    ]
    assert cpu_dist_workers.run(_all_reduced_pid) == before


def _wait_on_a_named_group(rank: int, size: int) -> None:
    named = dist.new_group(timeout=timedelta(seconds=20))
    with bounded_collectives(timedelta(seconds=0.5)):
        if rank == 1:
            time.sleep(1)
        dist.barrier(group=named)
        if rank == 0:
            time.sleep(1)
        # Positional, as `torch.distributed` also takes it.
        dist.all_gather_object([None] * size, rank, named)
    dist.destroy_process_group(named)


def test_bounded_collectives_keep_a_named_group(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_wait_on_a_named_group)


def _end_the_default_group(rank: int, size: int, store: str) -> None:
    with bounded_collectives(timedelta(seconds=0.3)):
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="not been initialized"):
            dist.barrier()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        if rank == 1:
            time.sleep(0.8)
        dist.barrier()
    _all_reduced_pid(rank, size)


def test_bounded_collectives_follow_a_default_group_that_the_block_replaces(
    cpu_dist_workers: DistributedWorkerPool, tmp_path: Path
) -> None:
    cpu_dist_workers.run(_end_the_default_group, str(tmp_path / "store"))


# ---------------------------------------------------------------------------- Leaks in this process

_LEAKING_TESTS = """
import os
import torch.distributed as dist

def test_variable():
    os.environ["TORCHELASTIC_RUN_ID"] = os.environ["RANK"] = "3"

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_deletion():
    del os.environ["MASTER_PORT"]

def test_clean(monkeypatch):
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    assert os.environ["MASTER_PORT"] == "1"
    monkeypatch.setenv("RANK", "3")
"""


def test_a_test_that_leaks_fails_and_the_next_does_not(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(_LEAKING_TESTS)
    environment = os.environ | {"PYTHONPATH": str(_TESTS), "MASTER_PORT": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-rpEF",
    ]
    command += ["-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "4 passed, 3 errors" in done.stdout, done.stdout
    for leaks in ["RANK, TORCHELASTIC_RUN_ID", "the default process group", "MASTER_PORT"]:
        assert f"leaked: {leaks}\n" in done.stdout
