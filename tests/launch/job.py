# SPDX-License-Identifier: Apache-2.0
"""What test_torchrun.py launches: `job.py CASE` runs one of the functions below in a run."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed

from modelopt.torch.utils.distributed import all_reduce, broadcast_from, distributed_run, rank

# Far longer than any test waits: a job that ends in time did not end by the timeout.
TIMEOUT = timedelta(minutes=10)


class UnprintableError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no text")


def raise_in_body() -> None:
    """Rank 1 raises while rank 0 sits in a collective."""
    print("printed before", end="")
    logging.warning("logged before")
    if rank() == 1:
        raise ValueError("boom of rank 1")
    all_reduce("batch size", lambda: 1, min)


def raise_unprintable() -> None:
    """Rank 1 raises what does not print."""
    if rank() == 1:
        raise UnprintableError
    broadcast_from("plan", lambda: 1, rank=1)


def raise_in_all_reduce() -> None:
    """Rank 1's part of a collective raises."""
    all_reduce("batch size", lambda: 1 // (1 - rank()), min)


def raise_in_broadcast() -> None:
    """The sender raises."""
    broadcast_from("plan", lambda: dict[str, int]()["missing"], rank=1)


def raise_in_every_rank() -> None:
    """Every rank raises by itself."""
    raise ValueError(f"boom of rank {rank()}")


def interrupt_one() -> None:
    """Rank 1 is interrupted, as by Ctrl-C, while rank 0 sits in a collective."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    all_reduce("batch size", lambda: 1, min)


def kill_in_body() -> None:
    """Rank 1 is killed while rank 0 sits in a collective."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce("batch size", lambda: 1, min)


def kill_in_all_reduce() -> None:
    """Rank 1 is killed in its part of a collective."""
    all_reduce("batch size", lambda: os.kill(os.getpid(), rank() * signal.SIGKILL), list)


def kill_in_broadcast() -> None:
    """The sender is killed."""
    broadcast_from("plan", lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)


def exit_in_broadcast() -> None:
    """The sender exits, and every rank with it."""
    broadcast_from("plan", lambda: sys.exit("no such model"), rank=1)


def exit_0() -> None:
    """Every rank exits."""
    sys.exit(0)


def exit_3() -> None:
    """Every rank exits."""
    sys.exit(3)


def exit_text() -> None:
    """Every rank exits."""
    sys.exit("no calibration data")


def exit_empty() -> None:
    """Every rank exits."""
    sys.exit(())  # type: ignore[arg-type]


def finish() -> None:
    """Every rank ends."""
    all_reduce("batch size", lambda: 1, min)


def different_collectives() -> None:
    """Rank 0 meets rank 1 in another collective."""
    if rank() == 0:
        broadcast_from("plan", lambda: 1)
    else:
        all_reduce("batch size", lambda: 1, min)


def _run(case: Callable[[], None]) -> None:
    with distributed_run(TIMEOUT, "cpu", backend="gloo"):
        case()


def _run_twenty(case: Callable[[], None]) -> None:
    for _ in range(20):
        _run(case)


def _run_in_the_callers_group(case: Callable[[], None]) -> None:
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    _run(case)
    all_reduce("alive", lambda: 1, sum)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, way = sys.argv[1], (sys.argv[2:] or ["_run"])[0]
    globals()[way](globals()[name])
    print(f"rank {os.environ['RANK']} is through", flush=True)
