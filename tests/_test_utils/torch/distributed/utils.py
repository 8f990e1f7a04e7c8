# SPDX-License-Identifier: Apache-2.0
"""Real ranks for tests: a pool of spawned workers, and collectives that cannot hang.

Whatever a job does on a rank (raise, exit, die, hang) fails that job within its deadline and leaves
nothing to the next. Deadlines nest: bounded collective < peers' grace < group < job < pytest's.

1. The pool, in the pytest process
2. A worker, in its own process
3. Bounded collectives, inside a job
"""

import atexit
import contextlib
import faulthandler
import functools
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

__all__ = [
    "DistributedWorkerPool",
    "bounded_collectives",
    "cpu_dist_workers",
    "default_worker_teardown",
    "launch_environment",
]

_BOUNDED_TIMEOUT = timedelta(seconds=10)
_IN_STEP_TIMEOUT = timedelta(seconds=3)
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.2

_LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BOUNDED_NAMES = (
    "all_gather_object",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)


# -------------------------------------------------------------- 1. The pool, in the pytest process


def default_worker_teardown() -> None:
    """Destroy every process group of this rank, if it has any."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Outcome:
    """What a call came to on one rank: a value, or a problem that says how it failed."""

    problem: str | None
    value: Any = None


class DistributedWorkerPool:
    """Run jobs on spawned ranks that live on between jobs and share one process group.

    A job fails when a rank raises, exits, dies, or has not returned `peer_grace_seconds` after the
    first failure or `job_timeout_seconds` after the start. Its ranks are then killed, and the next
    job gets new ones. A job that leaves ranks out of step gives the next one new ranks too; one
    that succeeds but leaves other groups than it found costs only a new group. Environment
    variables are put back after each job. The timeouts may be set on a pool.

    Args:
        world_size: The number of ranks.
        backend: The backend of the process group. With NCCL, rank r is bound to CUDA device r.
        teardown_fn: Called on each rank, without arguments, at `shutdown()` and before a new
            group replaces one in place. The job may have destroyed its groups already; those that
            are left after the call are destroyed.
    """

    group_timeout_seconds = 30.0
    job_timeout_seconds = 60.0
    # New ranks import torch before they meet, which takes many seconds on a busy machine.
    start_timeout_seconds = 40.0
    # Longer than a bounded collective, so that a stranded peer reports its own traceback first.
    peer_grace_seconds = 15.0

    def __init__(
        self,
        world_size: int,
        backend: str = "nccl",
        teardown_fn: Callable[[], object] = default_worker_teardown,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size!r}")
        self.world_size = world_size
        self.backend = backend
        self._teardown_fn = teardown_fn
        self._temporary = tempfile.TemporaryDirectory(prefix="worker_pool_")
        self._folder = Path(self._temporary.name)
        self._generation = 0
        self._has_group = self._has_clean_group = self._is_shut_down = False
        self._workers: list[_Worker] = []
        self._spawn()
        # It runs before multiprocessing's own exit hook, which would wait for the workers forever.
        atexit.register(self.shutdown)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(rank, world_size, *args, **kwargs)` on every rank.

        Args:
            fn: A module-level function, or a `functools.partial` of one.
            *args: Further arguments, pickled.
            **kwargs: Keyword arguments, pickled.

        Returns:
            The ranks' return values, index = rank.

        Raises:
            RuntimeError: Where a rank fails, with every failing rank's traceback and the stack of
                every rank that is stuck; where the pool is shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("This worker pool is shut down. Make a new one.")
        job = pickle.dumps((fn, args, kwargs))
        try:
            self._ensure_group()
            outcomes = self._call(functools.partial(_run_job, job=job), self.job_timeout_seconds)
            self._raise_problems(f"Job {getattr(fn, '__qualname__', repr(fn))}", outcomes)
        except BaseException:
            # Also on Ctrl-C or a test's timeout: an answer left unread would go to the next job.
            self._kill()
            raise
        self._has_clean_group = all(outcome.value[1] for outcome in outcomes)
        return [outcome.value[0] for outcome in outcomes]

    def shutdown(self) -> None:
        """Run `teardown_fn` on each rank and end the ranks; nothing where that was done before.

        Raises:
            RuntimeError: Where `teardown_fn` fails on a rank. The ranks are gone nevertheless.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        try:
            if self._has_group and self._are_alive():
                teardown = functools.partial(_tear_down, teardown_fn=self._teardown_fn)
                outcomes = self._call(teardown, self.job_timeout_seconds)
                self._raise_problems("Teardown", outcomes)
                # Each then ends by itself, so that its exit hooks run.
                for worker in self._workers:
                    worker.connection.close()
                for worker in self._workers:
                    worker.wait()
        finally:
            self._kill()
            self._temporary.cleanup()

    def _spawn(self) -> None:
        ranks = range(self.world_size)
        self._workers = [_Worker(rank, self.world_size, self._folder) for rank in ranks]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.wait()
            worker.connection.close()
        self._workers = []
        self._has_group = self._has_clean_group = False

    def _are_alive(self) -> bool:
        return bool(self._workers) and all(w.process.exitcode is None for w in self._workers)

    def _ensure_group(self) -> None:
        """Keep the ranks' group, replace it in place, or start new ranks: the first that works."""
        if self._has_group and self._are_alive():
            # A job may have caught the error of a broken collective, or left one unfinished.
            outcomes = self._meet() if self._has_clean_group else self._set_up()
            if not any(outcome.problem for outcome in outcomes):
                return
            self._kill()
        if not self._are_alive():
            self._kill()
            self._spawn()
        self._raise_problems("Setting up the process group", self._set_up())

    def _meet(self) -> list[_Outcome]:
        return self._call(_meet, 2 * _IN_STEP_TIMEOUT.total_seconds())

    def _set_up(self) -> list[_Outcome]:
        self._generation += 1
        set_up = functools.partial(
            _set_up,
            backend=self.backend,
            # A new file each: the last group's keys would lead to sockets that are closed.
            rendezvous=f"file://{self._folder}/rendezvous{self._generation}",
            timeout=timedelta(seconds=self.group_timeout_seconds),
            teardown_fn=self._teardown_fn if self._has_group else None,
        )
        outcomes = self._call(set_up, self.start_timeout_seconds)
        self._has_group = self._has_clean_group = True
        return outcomes

    def _call(self, fn: Callable[..., object], timeout_seconds: float) -> list[_Outcome]:
        """Call `fn(rank, world_size)` on the workers; returns in time whatever they do."""
        request = pickle.dumps((sys.path, pickle.dumps(fn)))
        for worker in self._workers:
            worker.send(request)
        outcomes: dict[int, _Outcome] = {}
        start = time.monotonic()
        deadline = start + timeout_seconds
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            running = [worker for worker in self._workers if worker.rank not in outcomes]
            wait([worker.connection for worker in running], _POLL_SECONDS)
            for worker in running:
                if (outcome := worker.poll()) is None:
                    continue
                outcomes[worker.rank] = outcome
                if outcome.problem:
                    deadline = min(deadline, time.monotonic() + self.peer_grace_seconds)
        stuck = f"was still running after {time.monotonic() - start:.1f} s. Its stack:\n"
        for worker in self._workers:
            if worker.rank not in outcomes:
                outcomes[worker.rank] = _Outcome(stuck + worker.stack())
        return [outcomes[rank] for rank in range(self.world_size)]

    def _raise_problems(self, what: str, outcomes: list[_Outcome]) -> None:
        failed = [str(rank) for rank, outcome in enumerate(outcomes) if outcome.problem]
        if failed:
            lines = [f"{what} failed on rank {', '.join(failed)} of {self.world_size} ranks."]
            lines += [f"Rank {r} {o.problem or 'returned.'}" for r, o in enumerate(outcomes)]
            raise RuntimeError("\n".join(lines))


@pytest.fixture(scope="session")
def cpu_dist_workers() -> Iterator[DistributedWorkerPool]:
    """Two gloo ranks, which the tests of a pytest process share."""
    pool = DistributedWorkerPool(2, backend="gloo")
    yield pool
    pool.shutdown()


class _Worker:
    """One spawned rank, seen from the pytest process."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self._stack_path = folder / f"stack{rank}"
        self._stack_path.unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not daemonic: a daemon may have no children, and a job's DataLoader may want workers.
        self.process = context.Process(
            target=_serve, args=(rank, world_size, theirs, self._stack_path), name=f"rank{rank}"
        )
        self.process.start()
        theirs.close()

    def send(self, request: bytes) -> None:
        # To a worker that is gone: its exit code tells when it is polled.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(request)

    def poll(self) -> _Outcome | None:
        """Return what the worker answered, or how it died; None while it runs."""
        # Read first, since an answer sent before death counts.
        exitcode = self.process.exitcode
        try:
            answer = self.connection.recv_bytes() if self.connection.poll() else None
        except (EOFError, OSError):
            answer, exitcode = None, self.wait() or 0
        if answer is None:
            return None if exitcode is None else _Outcome(f"died with exit code {exitcode}.")
        try:
            return _Outcome(*pickle.loads(answer))  # noqa: S301  (from this pool's own rank)
        except Exception:  # noqa: BLE001  (a value's own __setstate__ may raise anything)
            return _Outcome(f"returned what does not load here:\n{traceback.format_exc()}")

    def stack(self) -> str:
        """Return the stack of each of the worker's threads, wherever they are stuck."""
        if self.process.pid is None or not self._stack_path.exists():
            return "(none: it was still starting)"
        os.kill(self.process.pid, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            before, text = text, self._stack_path.read_text()
            if text and text == before:
                break
        return text or "(none: it took no signal)"

    def wait(self) -> int | None:
        """Return the exit code of a worker that is about to end."""
        # Not `join`, which waits for a pipe's end: processes that the worker forked hold it open.
        deadline = time.monotonic() + _EXIT_SECONDS
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.process.exitcode


# ---------------------------------------------------------------- 2. A worker, in its own process


def launch_environment() -> dict[str, str]:
    """Return the environment variables that a launcher such as torchrun sets, where present."""
    names = (n for n in os.environ if n in _LAUNCH_VARIABLES or n.startswith("TORCHELASTIC_"))
    return {name: os.environ[name] for name in names}


def _serve(rank: int, world_size: int, connection: Connection, stack_path: Path) -> None:
    """Answer the pool's requests, one at a time, until the pool lets go or its process ends."""
    with stack_path.open("w") as stack_file:
        # The handler is C code: it answers even where a collective keeps Python from running.
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        for name in launch_environment():
            del os.environ[name]
        torch.set_num_threads(1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # What a job printed before its rank was killed would be lost in the buffer.
            sys.stdout.reconfigure(line_buffering=True)
        # KeyboardInterrupt: Ctrl-C in the terminal reaches idle workers too.
        with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
            while True:
                connection.send_bytes(_answer(rank, world_size, connection.recv_bytes()))


def _exit_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _answer(rank: int, world_size: int, request: bytes) -> bytes:
    try:
        paths, call = pickle.loads(request)  # noqa: S301  (from this rank's own pool)
        # A test module may stand on a path that is newer than this process.
        sys.path.extend(path for path in paths if path not in sys.path)
        fn = pickle.loads(call)  # noqa: S301
        return pickle.dumps((None, fn(rank, world_size)))
    except BaseException:  # noqa: BLE001  (an exit of the job must not end the worker)
        return pickle.dumps((f"raised:\n{traceback.format_exc()}", None))


def _set_up(
    rank: int,
    world_size: int,
    *,
    backend: str,
    rendezvous: str,
    timeout: timedelta,
    teardown_fn: Callable[[], object] | None,
) -> None:
    if teardown_fn is not None:
        _tear_down(rank, world_size, teardown_fn=teardown_fn)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout
    )


def _tear_down(rank: int, world_size: int, *, teardown_fn: Callable[[], object]) -> None:
    teardown_fn()
    default_worker_teardown()


def _meet(rank: int, world_size: int) -> None:
    if dist.get_backend() == "gloo":
        dist.monitored_barrier(timeout=_IN_STEP_TIMEOUT)


def _run_job(rank: int, world_size: int, *, job: bytes) -> tuple[Any, bool]:
    """Return the job's value, and whether it left the groups as it found them."""
    fn, args, kwargs = pickle.loads(job)  # noqa: S301
    environment, default = dict(os.environ), dist.group.WORLD
    try:
        value = fn(rank, world_size, *args, **kwargs)
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
    is_alone = len(dist.distributed_c10d._world.pg_map) == 1
    return value, is_alone and dist.group.WORLD is default


# ----------------------------------------------------------- 3. Bounded collectives, inside a job


@contextlib.contextmanager
def bounded_collectives(timeout: timedelta = _BOUNDED_TIMEOUT) -> Iterator[None]:
    """Bound the object collectives and barriers of the default group for a block.

    Every rank must enter the block. In it, `torch.distributed`'s object collectives and `barrier`,
    where they name no group or the default one, run on a gloo group of all ranks: a rank whose
    peers stay away fails after `timeout`, and at once when a peer leaves the block. Any other group
    is kept, and so is a default group that the block sets up itself.

    Args:
        timeout: What each collective may take.
    """
    default = dist.group.WORLD
    bounded = dist.new_group(backend="gloo", timeout=timeout)
    try:
        with contextlib.ExitStack() as stand_ins:
            for name in _BOUNDED_NAMES:
                stand_in = _bound(getattr(dist, name), default, bounded)
                stand_ins.enter_context(mock.patch.object(dist, name, stand_in))
            yield
    finally:
        # A block that destroyed the default group has destroyed this one with it.
        if dist.group.WORLD is default:
            dist.destroy_process_group(bounded)


def _bound(collective: Callable[..., Any], default: object, bounded: object) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def on_bounded_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        is_of_default = call.arguments.get("group") in (None, default)
        if is_of_default and dist.group.WORLD is default:
            call.arguments["group"] = bounded
        return collective(*call.args, **call.kwargs)

    return on_bounded_group
