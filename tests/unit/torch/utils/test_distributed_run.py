# SPDX-License-Identifier: Apache-2.0
"""Starting and ending a run. What only a launcher shows is in tests/launch."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from _test_utils.torch.distributed.ranks import Outcome, launched, outcome_of
from _test_utils.torch.distributed.utils import DistributedWorkerPool

import modelopt.torch.utils.distributed as mdist
from modelopt.torch.utils.distributed import DistributedState, distributed_run

TIMEOUT = timedelta(seconds=20)
GPU_BACKEND = "cpu:gloo,cuda:nccl"
on_cpu = functools.partial(distributed_run, TIMEOUT, "cpu", backend="gloo")


@contextlib.contextmanager
def _ending_seen() -> Iterator[list[str]]:
    """Yield the list of what ends the run: barriers, the destruction of groups, and aborts."""
    seen: list[str] = []
    destroy, real_barrier = torch.distributed.destroy_process_group, mdist.barrier

    def barrier(group: Any = None) -> None:
        seen.append("barrier")
        # A rank that went on at once would close its sockets while its peer still connects.
        real_barrier(group)

    def abort() -> None:
        seen.append("abort")

    def destroy_seen(group: Any = None) -> None:
        seen.append("destroy")
        destroy(group)

    with (
        mock.patch.object(mdist, "barrier", barrier),
        mock.patch.object(torch.distributed, "destroy_process_group", destroy_seen),
        mock.patch.object(mdist, "abort", abort),
    ):
        yield seen


def _one_rank_group() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _raise(error: BaseException) -> None:
    raise error


def _close_unfinished() -> None:
    def body() -> Generator[None]:
        with on_cpu():
            yield

    generator = body()
    next(generator)
    generator.close()


# On a launch


def _launch(rank: int, size: int, port: int) -> None:
    with launched(rank, size, port) as events:
        with distributed_run(timeout=TIMEOUT) as state:
            assert state == DistributedState(rank, size, torch.device(f"cuda:{rank}"))
            assert state.is_main == (rank == 0)
            assert mdist.is_distributed_run()
        assert events == [("bind", rank), ("init", GPU_BACKEND, TIMEOUT)]
    assert not mdist.is_initialized()


def test_launch_binds_the_device_then_sets_the_group_up(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_launch, launch_port)


def _launch_with_misleading_ranks(rank: int, size: int, port: int) -> None:
    # The second of two nodes with one GPU each: the local rank picks the device.
    with launched(rank, size, port) as events, mock.patch.dict(os.environ, LOCAL_RANK="0"):
        with distributed_run(timeout=TIMEOUT) as state:
            assert (state.rank, state.device) == (rank, torch.device("cuda:0"))
        assert events[0] == ("bind", 0)


def test_local_rank_picks_the_device(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_launch_with_misleading_ranks, launch_port)


def _launch_on_cpu(rank: int, size: int, port: int) -> None:
    for device in ("cpu", torch.device("cpu")):
        with launched(rank, size, port) as events:
            with distributed_run(TIMEOUT, device, backend="gloo") as state:
                assert state == DistributedState(rank, size, torch.device("cpu"))
            assert events == [("init", "gloo", TIMEOUT)]


def test_launch_on_cpu_ranks_binds_no_device(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_launch_on_cpu, launch_port)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", None),
        ("cuda:1", None),
        (torch.device("cuda", 0), None),
        (torch.device("cpu"), None),
        ("gpu", None),
        ("cuda", "gloo"),
        ("cuda", "nccl"),
        ("cpu:0", "gloo"),
    ],
)
def test_launch_refuses_another_device_before_anything_is_set_up(
    monkeypatch: pytest.MonkeyPatch, device: str | torch.device, backend: str | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(mdist, "setup", lambda **_: pytest.fail("set up"))
    with (
        pytest.raises(ValueError, match=rf"{device}.*LOCAL_RANK.*backend=\"gloo\".*device=\"cpu\""),
        distributed_run(device=device, backend=backend),
    ):
        pass


def _caller_group(should_raise: bool, rank: int, size: int, port: int) -> None:
    with launched(rank, size, port) as events, _ending_seen() as seen:
        mdist.setup(timeout=TIMEOUT)
        events.clear()

        def body() -> None:
            with distributed_run(timeout=timedelta(seconds=9)) as state:
                assert state.device == torch.device(f"cuda:{rank}")
                if should_raise:
                    raise ValueError("boom")

        outcome = outcome_of(body)
        assert outcome.raised == ("ValueError" if should_raise else None)
        assert events == [("bind", rank)]
        assert seen == []
        assert mdist.all_reduce("alive", lambda: rank, list) == [0, 1]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("should_raise", [False, True])
def test_group_of_the_caller_outlives_the_run(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int, should_raise: bool
) -> None:
    cpu_dist_workers.run(functools.partial(_caller_group, should_raise), launch_port)


def _nested(rank: int, size: int, port: int) -> None:
    with launched(rank, size, port), on_cpu():
        with on_cpu() as inner:
            assert inner == DistributedState(rank, size, torch.device("cpu"))
        assert mdist.all_reduce("outer", lambda: rank, list) == [0, 1]


def test_nested_run_leaves_the_group_to_the_outer_one(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_nested, launch_port)


def _runs_in_a_row(rank: int, size: int, port: int) -> None:
    with launched(rank, size, port):
        for turn in range(20):
            if turn == 1:
                # The early rank would read the address that this one left in the first run.
                time.sleep(rank)
            with on_cpu():
                assert mdist.all_reduce("turn", lambda: turn, list) == [turn, turn]  # noqa: B023
            assert not mdist.is_initialized()


def test_runs_may_follow_one_another(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_runs_in_a_row, launch_port)


LATE = """
import datetime, time
from modelopt.torch.utils.distributed import distributed_run

start = time.monotonic()
try:
    with distributed_run(datetime.timedelta(seconds=1), "cpu", backend="gloo"):
        pass
except Exception as error:
    print(type(error).__name__, time.monotonic() - start, error)
"""


def _come_alone(port: int, rank: int, has_store: bool = True) -> list[str]:
    """Set up on a rank whose peer never arrives; return the error's type, its time and its text."""
    # Without a store of the launcher's, rank 0 would serve it on the port.
    launch = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "localhost"}
    launch["MASTER_PORT"] = str(port) if has_store else "1"
    launch["TORCHELASTIC_USE_AGENT_STORE"] = str(has_store)
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, **launch},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split(maxsplit=2)


@pytest.mark.parametrize(
    ("rank", "has_store", "text"),
    [
        (0, True, "ranks [1] did not come to rank 0 within the timeout (0:00:0"),
        (1, True, "rank 0 did not answer rank 1 within the timeout"),
        (1, False, "timed out after 1000ms while trying to connect to (localhost, 1)"),
    ],
)
def test_set_up_waits_for_a_peer_no_longer_than_the_timeout(
    launch_port: int, rank: int, has_store: bool, text: str
) -> None:
    error, seconds, told = _come_alone(launch_port, rank, has_store)
    assert error.endswith("Error")
    assert float(seconds) < 8
    assert text in told


def test_set_up_works_after_an_attempt_that_broke_off(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    for rank in (0, 1):
        _come_alone(launch_port, rank)
    cpu_dist_workers.run(_launch, launch_port)


# How a run ends


def _end(body: Callable[[], object], rank: int, size: int, port: int) -> tuple[Any, ...]:
    stderr = io.StringIO()
    with launched(rank, size, port), _ending_seen() as seen, contextlib.redirect_stderr(stderr):

        def run() -> None:
            with on_cpu():
                os.environ["RANK"] = "7"  # the report must name the live group's rank
                body()

        outcome = outcome_of(run)
    return outcome, seen, stderr.getvalue()


ENDINGS: list[tuple[str, Callable[[], object], Outcome]] = [
    ("success", functools.partial(int), Outcome(None, None)),
    ("exit", functools.partial(sys.exit, 3), Outcome("SystemExit", 3)),
    ("exit 0", functools.partial(sys.exit, 0), Outcome("SystemExit", 0)),
]


@pytest.mark.parametrize(("name", "body", "expected"), ENDINGS)
def test_clean_end_waits_for_every_rank_then_destroys_the_group(
    cpu_dist_workers: DistributedWorkerPool,
    launch_port: int,
    name: str,
    body: Callable[[], object],
    expected: Outcome,
) -> None:
    for outcome, seen, stderr in cpu_dist_workers.run(functools.partial(_end, body), launch_port):
        assert outcome == expected
        assert seen == ["barrier", "destroy"]
        assert stderr == ""


@pytest.mark.parametrize("error", [ValueError("two\nlines"), KeyboardInterrupt(), MemoryError()])
def test_body_that_raises_is_reported_on_one_line_and_aborts(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int, error: BaseException
) -> None:
    case = functools.partial(_end, functools.partial(_raise, error))
    for rank, (outcome, seen, stderr) in enumerate(cpu_dist_workers.run(case, launch_port)):
        assert outcome.raised == type(error).__name__
        assert seen == ["abort"]
        assert stderr.count("\n") == 1
        assert f"rank {rank} of 2" in stderr
        assert f"{type(error).__name__}{': two lines' if str(error) else ''}\n" in stderr


def _close(rank: int, size: int, port: int) -> tuple[list[str], str]:
    stderr = io.StringIO()
    with launched(rank, size, port), _ending_seen() as seen, contextlib.redirect_stderr(stderr):
        _close_unfinished()
    return seen, stderr.getvalue()


def test_unfinished_generator_is_no_body_error(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    for seen, stderr in cpu_dist_workers.run(_close, launch_port):
        assert (seen, stderr) == (["barrier", "destroy"], "")


def _inside_an_except_block(rank: int, size: int, port: int) -> list[str]:
    with launched(rank, size, port), _ending_seen() as seen:
        try:
            raise ValueError("somebody else's")
        except ValueError:
            with on_cpu():
                pass
    return seen


def test_exception_of_somebody_else_does_not_decide(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    for seen in cpu_dist_workers.run(_inside_an_except_block, launch_port):
        assert seen == ["barrier", "destroy"]


def _set_up_by_the_body(rank: int, size: int) -> tuple[list[str], Outcome]:
    """A group of several ranks that the body sets up, without a launch."""
    store = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.destroy_process_group()

    def body() -> None:
        with distributed_run(device="cpu") as state:
            assert state.world_size == 1
            torch.distributed.init_process_group(
                "gloo",
                store=torch.distributed.PrefixStore("body", store),
                rank=rank,
                world_size=size,
            )
            raise ValueError("boom")

    with _ending_seen() as seen:
        return seen, outcome_of(body)


def test_error_over_a_group_of_the_body_aborts(cpu_dist_workers: DistributedWorkerPool) -> None:
    for seen, outcome in cpu_dist_workers.run(_set_up_by_the_body):
        assert seen == ["abort"]
        assert outcome.raised == "ValueError"


# Without a launch


def test_single_process_sets_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdist, "setup", lambda **_: pytest.fail("set up"))
    for device in ("cuda", "cuda:1", "cpu", torch.device("meta")):
        with distributed_run(device=device, backend="nccl") as state:
            assert state == DistributedState(0, 1, device)
            assert state.is_main


def _live_group(rank: int, size: int) -> None:
    with distributed_run(device="cuda:5") as state:
        assert state == DistributedState(rank, size, "cuda:5")
    assert mdist.all_reduce("alive", lambda: rank, list) == [0, 1]


def test_group_without_a_launch_gives_its_rank_and_size(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_live_group)


@pytest.mark.parametrize("error", [None, ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_single_process_destroys_a_group_of_the_body_and_never_aborts(
    error: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        with distributed_run(device="cpu"):
            _one_rank_group()
            if error is not None:
                raise error

    with _ending_seen() as seen:
        outcome = outcome_of(body)
    assert outcome.raised == (type(error).__name__ if error else None)
    assert seen == ["barrier", "destroy"]
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == (0 if error is None or isinstance(error, SystemExit) else 1)


def test_error_of_a_single_process_is_the_callers_to_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="boom"), distributed_run(device="cpu"):
        raise ValueError("boom")
    assert capsys.readouterr().err == "distributed_run: rank 0 of 1 failed: ValueError: boom\n"


class _ClosedStream(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_report_that_fails_does_not_take_the_place_of_the_error() -> None:
    with (
        pytest.raises(ValueError, match="boom"),
        contextlib.redirect_stderr(_ClosedStream()),
        distributed_run(device="cpu"),
    ):
        raise ValueError("boom")


# setup and cleanup


def _set_up_again(rank: int, size: int, port: int) -> None:
    with launched(rank, size, port) as events:
        mdist.setup(timeout=TIMEOUT)
        group = torch.distributed.group.WORLD
        mdist.setup(timeout=TIMEOUT)
        mdist.setup(timeout=TIMEOUT, backend="gloo")
        assert torch.distributed.group.WORLD is group
        assert events == [("bind", rank), ("init", GPU_BACKEND, TIMEOUT), ("bind", rank)]
        mdist.cleanup()
        assert not mdist.is_initialized()
        mdist.cleanup()


def test_setup_binds_always_and_initialises_once(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    cpu_dist_workers.run(_set_up_again, launch_port)


def test_setup_leaves_a_launch_without_a_rendezvous_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def init(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "init_process_group", init)
        mdist.setup(timeout=TIMEOUT, backend="mpi")  # MPI brings its own
    assert calls == [(("mpi",), {"timeout": TIMEOUT})]
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        mdist.setup(backend="gloo")


@pytest.mark.parametrize(
    ("handled", "expected"),
    [
        (None, ["barrier", "destroy"]),
        (SystemExit(0), ["barrier", "destroy"]),
        (ValueError("boom"), ["destroy"]),
        (KeyboardInterrupt(), ["destroy"]),
    ],
)
def test_cleanup_skips_the_barrier_while_an_error_is_handled(
    handled: BaseException | None, expected: list[str]
) -> None:
    _one_rank_group()
    with _ending_seen() as seen:
        try:
            if handled is not None:
                raise handled
            mdist.cleanup()
        except BaseException:  # noqa: BLE001
            mdist.cleanup()
    assert seen == expected
    assert not mdist.is_initialized()


def test_cleanup_outlives_a_barrier_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _one_rank_group()
    monkeypatch.setattr(mdist, "barrier", lambda: _raise(RuntimeError("peer gone")))
    mdist.cleanup()
    assert not mdist.is_initialized()


# abort

ABORT = """
import atexit, io, logging, sys, time
import modelopt.torch.utils.distributed as mdist

atexit.register(lambda: print("at exit"))
logging.basicConfig(level="INFO")

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

try:
    print("printed before")
    logging.info("logged before")
    {body}
except BaseException:
    mdist.abort({argument})
"""


def _abort(
    tmp_path: Path, body: str, argument: str = "", error_file: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, TORCHELASTIC_ERROR_FILE=str(error_file or tmp_path / "error"))
    environment.pop("PYTHONUNBUFFERED", None)  # buffers are what a rank could lose
    script = ABORT.format(body=body, argument=argument)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def test_abort_prints_flushes_records_and_exits_at_once(tmp_path: Path) -> None:
    done = _abort(tmp_path, "raise ValueError('boom')", "5")
    assert done.returncode == 5
    # Buffered output arrives although stdout is a pipe and no exit hook runs.
    assert done.stdout == "printed before\n"
    assert "logged before" in done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    message = json.loads((tmp_path / "error").read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "raise ValueError('boom')" in message["extraInfo"]["py_callstack"] or (
        "ValueError: boom" in message["extraInfo"]["py_callstack"]
    )


def test_abort_exits_with_1_unless_told(tmp_path: Path) -> None:
    assert _abort(tmp_path, "raise ValueError").returncode == 1


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("raise Unprintable", "Unprintable"),
        ("sys.stdout.close(); raise ValueError('boom')", "ValueError: boom"),
        ("sys.stdout = None; raise ValueError('boom')", "ValueError: boom"),
        ("sys.stderr = None; raise ValueError('boom')", ""),
    ],
)
def test_abort_is_kept_neither_alive_nor_silent(tmp_path: Path, body: str, printed: str) -> None:
    done = _abort(tmp_path, body)
    assert done.returncode == 1
    assert printed in done.stderr
    recorded = (tmp_path / "error").read_text()
    assert printed.split(":", maxsplit=1)[0] in recorded


def test_abort_lets_the_launcher_see_the_peer_that_failed_first() -> None:
    peer = mdist._peer_error("failed on rank 1")
    wrapped, unrelated = ValueError("wrapped"), ValueError("unrelated")
    wrapped.__cause__ = peer
    ring = ValueError("ring")
    ring.__cause__, wrapped.__context__ = ring, unrelated
    assert mdist._is_of_peer(peer)
    assert mdist._is_of_peer(wrapped)
    assert not mdist._is_of_peer(unrelated)
    assert not mdist._is_of_peer(RuntimeError("unrelated"))
    assert not mdist._is_of_peer(ring)
    assert mdist._is_of_peer(torch.distributed.DistNetworkError("connection reset"))


def _meet_one_that_left(rank: int, size: int) -> bool | None:
    group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    torch.distributed.barrier(group=group)  # connected
    try:
        if rank == 1:
            torch.distributed.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return mdist._is_of_peer(error)
    finally:
        torch.distributed.destroy_process_group(group)
    return None


def test_bare_collective_that_broke_is_a_peers_failure(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    assert cpu_dist_workers.run(_meet_one_that_left) == [None, True]


@pytest.mark.parametrize(
    ("error", "waits"), [("ValueError()", False), ("mdist._peer_error('x')", True)]
)
def test_abort_waits_only_over_a_peers_failure(tmp_path: Path, error: str, waits: bool) -> None:
    slept = "time.sleep = lambda seconds: print('slept', seconds, flush=True); "
    done = _abort(tmp_path, f"{slept}raise {error}")
    assert ("slept 2.0" in done.stdout) == waits


def test_abort_outlives_a_record_that_fails(tmp_path: Path) -> None:
    done = _abort(tmp_path, "raise ValueError('boom')", error_file=tmp_path / "none" / "error")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom\n")


def test_abort_reraises_an_exit(tmp_path: Path) -> None:
    done = _abort(tmp_path, "sys.exit(4)")
    assert done.returncode == 4
    assert "at exit" in done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "error").exists()


def test_run_is_over_when_threads_of_its_group_have_had_their_turn() -> None:
    destroyed, turns = threading.Event(), list[str]()
    destroy = torch.distributed.destroy_process_group

    def destroy_and_tell() -> None:
        destroy()
        destroyed.set()

    def take_a_turn() -> None:
        destroyed.wait()
        turns.append("freed")

    thread = threading.Thread(target=take_a_turn)
    interval = sys.getswitchinterval()
    with mock.patch.object(torch.distributed, "destroy_process_group", destroy_and_tell):
        with on_cpu():
            _one_rank_group()
            thread.start()
            # Nobody is made to give the GIL up any more.
            sys.setswitchinterval(60)
        seen = list(turns)
    sys.setswitchinterval(interval)
    thread.join()
    assert seen == ["freed"]
