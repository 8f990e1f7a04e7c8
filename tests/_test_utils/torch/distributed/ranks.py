# SPDX-License-Identifier: Apache-2.0
"""What the ranks' parts of tests share: a call's outcome, and a launch as torchrun makes one."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch

from _test_utils.torch.distributed.utils import bounded_collectives
from modelopt.torch.utils.distributed import all_reduce


class Outcome(NamedTuple):
    """What a call came to on one rank, of plain types, so that it comes back from a worker."""

    raised: str | None
    value: Any
    cause: str | None = None

    @property
    def text(self) -> str:
        """Return the text of what was raised."""
        return str(self.value)


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Return the value of `call`, or the type and text (an exit's code) of what it raised."""
    try:
        return Outcome(None, call())
    except SystemExit as error:
        return Outcome("SystemExit", error.code)
    except BaseException as error:  # noqa: BLE001 -- reported, whatever it is
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        try:
            text = str(error)
        except RuntimeError:
            text = "unprintable"
        return Outcome(type(error).__name__, text, cause)


def bounded_outcome(rank: int, size: int, case: Callable[[int, int], Any]) -> Outcome:
    """Return the outcome of `case` on this rank; its ranks must be in step after it, and soon."""
    with bounded_collectives():
        start = time.monotonic()
        outcome = outcome_of(lambda: case(rank, size))
        seconds = time.monotonic() - start
        assert all_reduce("still in step", lambda: rank, list) == list(range(size))
        assert seconds < 5, f"rank {rank} waited {seconds:.1f} s"
    return outcome


@contextlib.contextmanager
def launched(rank: int, size: int, port: int) -> Iterator[list[Any]]:
    """Make this rank one of a launch whose group is not up.

    The rendezvous and the group are real; only CUDA's device binding and NCCL's name are stood in
    for. Yields the list of what was bound and set up, in order.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    events: list[Any] = []
    init = torch.distributed.init_process_group

    def init_on_cpu(backend: str, timeout: timedelta | None = None, **kwargs: Any) -> None:
        events.append(("init", backend, timeout))
        init("gloo", timeout=timeout, **kwargs)

    launch = {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with (
        mock.patch.dict(os.environ, launch),
        mock.patch.object(torch.cuda, "set_device", lambda index: events.append(("bind", index))),
        mock.patch.object(torch.distributed, "init_process_group", init_on_cpu),
    ):
        yield events
