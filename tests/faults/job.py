# SPDX-License-Identifier: Apache-2.0
"""What a case of matrix.py launches: `job.py CASE FOLDER` runs a rank of it.

The faulty rank fails in the case's place, in whatever way the case says; the others do their part,
and sooner or later wait for it.
"""

import atexit
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from faults.matrix import Case
from torch import nn
from torch.utils.data import DataLoader

from modelopt.torch.utils.distributed import (
    DistributionPlan,
    FileLock,
    all_reduce,
    broadcast_from,
    distributed_forward_loop,
    distributed_run,
    gather_bytes,
    gather_state_dicts,
    rank,
    set_distribution_plan,
    size,
)

CASE = Case(**json.loads(sys.argv[1]))
FOLDER = Path(sys.argv[2])
RANK = int(os.environ["RANK"])
IS_FAULTY = CASE.faulty in (RANK, None)
# The rank that sends or combines, where one does.
ROOT = CASE.faulty or 0


class UnprintableError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no text")


# ------------------------------------------------------------------------------------------ Faults


def _raise(error: BaseException) -> NoReturn:
    raise error


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)  # until it is delivered


FAULTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: 1,
    "raise": lambda: _raise(ValueError(f"boom of rank {RANK}")),
    "unprintable": lambda: _raise(UnprintableError()),
    "memory": lambda: bytearray(1 << 60),
    "interrupt": partial(_signal, signal.SIGINT),
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: sys.exit(0),
    "exit with a text": lambda: sys.exit("no calibration data"),
    "exit with ()": lambda: sys.exit(()),  # type: ignore[arg-type]
    "quit": lambda: os._exit(0),
    "lock": threading.Lock,
    "stop": partial(_signal, signal.SIGSTOP),
    "away": lambda: time.sleep(3600),
    **{name: partial(_signal, getattr(signal, name)) for name in ("SIGKILL", "SIGTERM", "SIGABRT")},
}


def fault() -> Any:
    """Fail on the faulty rank, and say when; elsewhere return a value."""
    if not IS_FAULTY or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return 1
    if CASE.fault != "nothing":
        stamp = FOLDER / f"stamp-{RANK}"
        stamp.write_text(str(time.monotonic()))
        stamp.rename(FOLDER / "fault")
    return FAULTS[CASE.fault]()


# ---------------------------------------------------------------------------------- Places of ours


def in_body() -> None:
    """Before a collective that the others wait in."""
    fault()
    all_reduce("batch size", lambda: 1, min)


def in_broadcast() -> None:
    """In the sender's part of a collective."""
    broadcast_from("plan", fault, rank=ROOT)


def in_all_reduce() -> None:
    """In one rank's part of a collective."""
    all_reduce("batch size", fault, list)


def caught() -> None:
    """In one rank's part of a collective whose failure every rank goes on after."""
    with contextlib.suppress(Exception):
        all_reduce("batch size", fault, list)
    assert all_reduce("next", lambda: RANK, list) == list(range(CASE.ranks))


def in_combine() -> None:
    """When every rank has the values."""
    all_reduce("batch size", lambda: 1, lambda _values: fault())
    all_reduce("next", lambda: 1, min)


def in_gather_bytes() -> None:
    """After the first of two chunks was sent, or received."""
    with _strikes_in_second_call("send"), _strikes_in_second_call("irecv"):
        gather_bytes(bytes(2000), dst=0, chunk_bytes=1000)
    all_reduce("next", lambda: 1, min)


def _strikes_in_second_call(name: str) -> Any:
    """Fail in the second call of a function of torch.distributed."""
    return mock.patch.object(
        dist, name, mock.Mock(wraps=getattr(dist, name), side_effect=_in_second_call())
    )


def _in_second_call() -> Callable[..., Any]:
    calls: list[int] = []

    def effect(*_args: Any, **_kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            fault()
        return mock.DEFAULT  # go on to the function

    return effect


class FaultWhenSaved:
    """A part of a state that strikes when it is serialised."""

    def __reduce__(self) -> tuple[type, tuple[object]]:
        """Fail."""
        return str, (fault(),)


def in_gather_state_dicts() -> None:
    """When one rank's state is serialised."""
    state: dict[str, Any] = {"weight": torch.ones(8)}
    if IS_FAULTY:
        state["odd"] = FaultWhenSaved()
    list(gather_state_dicts(state, dst=0))
    all_reduce("next", lambda: 1, min)


def in_forward_loop() -> None:
    """In the second forward of a model whose forwards communicate."""
    forwards: list[int] = []

    def communicate(*_args: Any) -> None:
        forwards.append(1)
        if len(forwards) == 2:
            fault()
        dist.all_reduce(torch.ones(1))

    model = nn.Linear(4, 2)
    set_distribution_plan(model, DistributionPlan(size()))
    model.register_forward_pre_hook(communicate)
    samples: Any = torch.ones(8, 4)
    distributed_forward_loop(model, DataLoader(samples, batch_size=2))()


def in_export() -> None:
    """Within a lock, when half a file is written."""
    if IS_FAULTY:
        with FileLock(FOLDER / "lock"), (FOLDER / "model.safetensors").open("w") as file:
            file.write("half of it")
            file.flush()
            fault()
    all_reduce("exported", lambda: 1, min)


def in_the_end() -> None:
    """In the barrier that ends a run."""

    def strike(**_: Any) -> None:
        fault()

    if IS_FAULTY:
        mock.patch.object(dist, "barrier", strike).start()


def elsewhere() -> None:
    """Nowhere in the body: before the run, or after it."""
    all_reduce("batch size", lambda: 1, min)


def in_different_collectives() -> None:
    """Nowhere: every rank waits, for they never meet."""
    (FOLDER / f"waits-{rank()}").touch()
    if rank() == 0:
        all_reduce("batch size", lambda: 1, min)
    else:
        broadcast_from("plan", lambda: 1)


# ------------------------------------------------------------------------- The same places of peers


def _torch_all_gather(fn: Callable[[], Any]) -> list[Any]:
    values: list[Any] = [None] * CASE.ranks
    dist.all_gather_object(values, fn())
    return values


def _torch_body(fn: Callable[[], Any]) -> None:
    fn()
    _next_of_torch()


def _torch_broadcast(fn: Callable[[], Any]) -> None:
    dist.broadcast_object_list([fn() if IS_FAULTY else None], src=ROOT)


def _torch_combine(fn: Callable[[], Any]) -> None:
    _next_of_torch()
    fn()
    _next_of_torch()


def _torch_gather(_fn: Callable[[], Any]) -> None:
    state = {"weight": torch.ones(8), "odd": FaultWhenSaved() if IS_FAULTY else 0}
    dist.gather_object(state, [None] * CASE.ranks if RANK == 0 else None)
    _next_of_torch()


def _next_of_torch() -> None:
    """Meet once more, as the next step of a script would."""
    assert _torch_all_gather(lambda: RANK) == list(range(CASE.ranks))


def _utils_broadcast(fn: Callable[[], Any]) -> None:
    from torch.distributed import collective_utils

    collective_utils.broadcast(fn, rank=ROOT, pg=dist.group.WORLD)


def _utils_all_gather(fn: Callable[[], Any]) -> None:
    from torch.distributed import collective_utils

    collective_utils.all_gather(fn, pg=dist.group.WORLD)


def _dcp() -> Any:
    # Imported here: it costs a second on top of torch, which the others' jobs would pay as well.
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(None, use_dist=True, coordinator_rank=ROOT)


def _dcp_combine(fn: Callable[[], Any]) -> None:
    _dcp().all_reduce("batch size", lambda: 1, lambda _values: fn())
    _next_of_torch()


def _caught(collective: Callable[[Callable[[], Any]], object]) -> None:
    # DCP's CheckpointException is no Exception.
    with contextlib.suppress(BaseException):
        collective(fault)
    _next_of_torch()


PLACES: dict[str, dict[str, Callable[[], object]]] = {
    "ours": {
        "body": in_body,
        "broadcast": in_broadcast,
        "all_reduce": in_all_reduce,
        "caught": caught,
        "combine": in_combine,
        "gather_bytes": in_gather_bytes,
        "gather_state_dicts": in_gather_state_dicts,
        "forward_loop": in_forward_loop,
        "export": in_export,
        "end_of_run": in_the_end,
        "set_up": elsewhere,
        "after_run": elsewhere,
        "different_collectives": in_different_collectives,
    },
    "torch": {
        "body": partial(_torch_body, fault),
        "broadcast": partial(_torch_broadcast, fault),
        "all_reduce": partial(_torch_all_gather, fault),
        "combine": partial(_torch_combine, fault),
        "gather_state_dicts": partial(_torch_gather, fault),
        "caught": partial(_caught, _torch_all_gather),
        "set_up": _next_of_torch,
    },
    "collective_utils": {
        "broadcast": partial(_utils_broadcast, fault),
        "all_reduce": partial(_utils_all_gather, fault),
        "caught": partial(_caught, _utils_all_gather),
    },
    "DCP": {
        "broadcast": lambda: _dcp().broadcast("plan", fault),
        "all_reduce": lambda: _dcp().all_gather("batch size", fault),
        "combine": partial(_dcp_combine, fault),
        "caught": partial(_caught, lambda fn: _dcp().all_gather("batch size", fn)),
    },
}


# --------------------------------------------------------------------------------------- The ranks


def main() -> None:
    """Do this rank's part of the case."""
    torch.set_num_threads(1)
    (FOLDER / f"rank-{RANK}-{os.getpid()}").touch()
    print("printed before", end="")
    logging.warning("logged before")
    timeout = timedelta(seconds=CASE.timeout_seconds)
    place = PLACES[CASE.library][CASE.place]
    if CASE.place == "set_up":
        fault()
    if CASE.library != "ours" or CASE.group == "caller":
        dist.init_process_group("gloo", timeout=timeout)
    if CASE.library == "ours":
        for _ in range(CASE.runs):
            with distributed_run(timeout, "cpu", backend="gloo"):
                place()
    else:
        place()
        dist.barrier()  # a rank that leaves earlier may break the others' last collective
    if CASE.group == "caller":
        all_reduce("alive", lambda: 1, sum)
    if dist.is_initialized():
        dist.destroy_process_group()
    if CASE.place == "after_run":
        fault()
        time.sleep(0 if IS_FAULTY else 3600)
    print(f"rank {RANK} is through", flush=True)


if __name__ == "__main__":
    if "SLEEP_AT_EXIT" in os.environ:
        atexit.register(time.sleep, 3600)
    main()
