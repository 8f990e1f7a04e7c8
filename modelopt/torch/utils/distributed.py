# SPDX-License-Identifier: Apache-2.0
"""What a torchrun-launched quantization script runs on: its ranks decide, fail and finish together.

1. Where am I: `rank`, `size`, `is_distributed_launch`, `is_distributed_run`, ...
2. Groups a module works in: `DistributedProcessGroup`, `ParallelState`
3. Starting and ending a run: `distributed_run`, `setup`, `cleanup`, `abort`
4. The plan recorded on a model: `DistributionPlan`, `set_distribution_plan`, `distribution_plan`
5. Collectives that fail together: `broadcast_from`, `all_reduce`
6. The older object helpers: `broadcast`, `allgather`, `allreduce`, `master_only`
7. Bytes, tensors and state dicts: `gather_bytes`, `gather_state_dicts`, `broadcast_state_dict`
8. How a model is laid out: `is_fsdp2_model`, `is_dtensor_sharded`, `fsdp2_wrap`
9. Calibrating on every rank: `shard_dataloader`, `distributed_forward_loop`
10. One process of a node: `FileLock`

The one rule: *queries never communicate; every rank reaches every other call in the same order.*

A **launch** is what the environment says (`WORLD_SIZE` > 1), readable before any process group
exists. A **run** is what is live: a process group is initialised with more than one rank. NCCL
serves GPU ranks, gloo serves CPU ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import io
import itertools
import operator
import os
import struct
import sys
import threading
import time
import traceback
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

if TYPE_CHECKING:
    from datetime import timedelta
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "DistributedProcessGroup",
    "DistributedState",
    "DistributionPlan",
    "ParallelState",
    "all_reduce",
    "backend",
    "barrier",
    "broadcast_from",
    "distributed_forward_loop",
    "distributed_run",
    "distribution_plan",
    "fsdp2_wrap",
    "gather_bytes",
    "gather_state_dicts",
    "is_available",
    "is_distributed_launch",
    "is_distributed_run",
    "is_fsdp2_model",
    "is_initialized",
    "is_master",
    "rank",
    "set_distribution_plan",
    "shard_dataloader",
    "size",
]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

# Object collectives and CPU tensors go over gloo, GPU tensors over NCCL, in one group.
_GPU_RUN_BACKEND = "cpu:gloo,cuda:nccl"
# An instance attribute: it outlives a `__class__` swap and stays out of `state_dict()`.
_PLAN_ATTRIBUTE = "_modelopt_distribution_plan"
# Between two looks at a store, of ranks that may arrive within milliseconds or minutes.
_POLL_SECONDS = 0.01
# Long enough for a launcher to see which rank ended first: torchrun looks ten times a second.
_PEER_FIRST_SECONDS = 2.0
_OF_PEER_ATTRIBUTE = "_modelopt_is_of_peer"
# Threads that wait for the GIL get it within microseconds, on a busy machine in milliseconds.
_SETTLE_SECONDS = 0.05
# What it may take to read where the peers are, once a collective broke.
_BOARD_SECONDS = 1.0
# A value of exactly these types pickles and loads everywhere; to look at each must stay cheap.
_PLAIN_TYPES = frozenset({bool, bytes, float, int, str, type(None)})
_PLAIN_ITEMS = 256
# What is in flight at a time: large enough for full speed, a small part of a GPU's memory.
_CHUNK_BYTES = 256 * 1024 * 1024
# Three numbers, then an error's text; one message for all keeps the exchange to one collective.
_HEADER_NUMBERS = "<qqq"
_HEADER_BYTES = 512
_new_bytearray = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
# torch's default group timeout: by then the peers of a process that waits have given up as well.
_LOCK_WAIT_SECONDS = 1800.0


# --------------------------------------------------------------------------------------------------
# 1. Where am I
# --------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Tell whether this build of torch has `torch.distributed`."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Tell whether a default process group is set up."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def backend() -> str | None:
    """Return `"torch"` once a default process group is set up, else None."""
    return "torch" if is_initialized() else None


def size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of the live `group` (default: all ranks), 1 without one."""
    return torch.distributed.get_world_size(group) if is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in the live `group` (default: all ranks), 0 without one."""
    return torch.distributed.get_rank(group) if is_initialized() else 0


def local_rank() -> int:
    """Return this process's index on its node, which is the index of its GPU.

    Without `LOCAL_RANK` this warns and gives the global rank: the live group's or, before a group
    is up, the launch's `RANK`.

    Raises:
        ValueError: The variable holds no whole number.
    """
    index = _whole_number_from_env("LOCAL_RANK")
    if index is not None:
        return index
    warnings.warn(
        "LOCAL_RANK is not set; taking the global rank for this process's index on its node, "
        "which is wrong on several nodes. Launch with torchrun, or set LOCAL_RANK.",
        stacklevel=2,
    )
    return rank() if is_initialized() else _whole_number_from_env("RANK") or 0


def is_master(group: ProcessGroup | None = None) -> bool:
    """Tell whether this process is rank 0 of `group`."""
    return rank(group) == 0


def is_last_process(group: ProcessGroup | None = None) -> bool:
    """Tell whether this process is the last rank of `group`."""
    return rank(group) == size(group) - 1


def is_distributed_launch() -> bool:
    """Tell whether the environment announces several ranks (`WORLD_SIZE` > 1).

    Readable before any process group exists; `is_distributed_run` tells what is live.

    Raises:
        ValueError: `WORLD_SIZE` holds no whole number.
    """
    return (_whole_number_from_env("WORLD_SIZE") or 1) > 1


def is_distributed_run() -> bool:
    """Tell whether a process group of more than one rank is live; a one-rank group is no run."""
    return size() > 1


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for every rank of `group`, all of which must call this; nothing for a group of one.

    Raises:
        RuntimeError: A peer died, or did not come within the group's timeout.
    """
    if size(group) > 1:
        torch.distributed.barrier(group=group)


def get_group(ranks: list[int]) -> ProcessGroup | None:
    """Make a gloo group of these global ranks; every rank of the run must call this.

    The group's timeout is the run's, so that nothing on it waits longer than the run would.

    Returns:
        The group (on a rank outside it, torch's `GroupMember.NON_GROUP_MEMBER`), or None without a
        default process group.
    """
    if not is_initialized():
        return None
    group: ProcessGroup | None = torch.distributed.new_group(
        ranks, timeout=_default_group_timeout(), backend="gloo"
    )
    return group


def _default_group_timeout() -> timedelta | None:
    """Return the default group's timeout, None (torch's own default) where torch does not tell."""
    default_group: Any = torch.distributed.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            backend_of_device = default_group._get_backend(torch.device(device))
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend that knows.
            inner = getattr(backend_of_device, "wrapped_pg", backend_of_device)
            timeout: timedelta = inner.options._timeout
            return timeout
    return None


def _whole_number_from_env(name: str) -> int | None:
    """Return the whole number that variable `name` holds, None where it is unset or empty."""
    value = os.environ.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"{name} must be a whole number; this process's environment says {value!r}. Launch "
            "with torchrun, which sets it, or unset it."
        ) from None


# --------------------------------------------------------------------------------------------------
# 2. Groups a module works in
# --------------------------------------------------------------------------------------------------


class DistributedProcessGroup:
    """A process group that a module synchronises over, or none.

    Args:
        group: A `ProcessGroup`, None for the default group, or -1 for unused.
    """

    def __init__(self, group: ProcessGroup | int | None = None) -> None:
        """Wrap `group`."""
        self.group: Any = group

    def is_initialized(self) -> bool:
        """Tell whether the group is used and a default process group is set up."""
        return self.group != -1 and is_initialized()

    def rank(self) -> int:
        """Return this process's rank in the group, -1 when it is not initialised."""
        return rank(self.group) if self.is_initialized() else -1

    def world_size(self) -> int:
        """Return the group's number of ranks, -1 when it is not initialised."""
        return size(self.group) if self.is_initialized() else -1

    def __repr__(self) -> str:
        """Show the group, this process's rank in it and its size."""
        name = type(self).__name__
        return f"{name}(group={self.group}, rank={self.rank()}, world_size={self.world_size()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedProcessGroup:
        """Return itself: a process group does not copy, and a copied module works in the same."""
        return self

    @staticmethod
    def get_dist_syncd_obj(
        obj: Any,
        groups: DistributedProcessGroup | Sequence[DistributedProcessGroup],
        op: Callable[[list[Any]], Any],
    ) -> Any:
        """Apply `op` to the list of every rank's `obj`, over one group or over several in turn.

        Every rank of the groups must call this, and each gets the result of the last group. Unused
        groups are skipped. A rank that fails before it leaves the others waiting until the group's
        timeout; `all_reduce` is the collective that fails together.

        Args:
            obj: This rank's value; it must pickle.
            groups: One group, or several to go over in turn.
            op: Takes the list of values, index = group rank.
        """
        for group in [groups] if isinstance(groups, DistributedProcessGroup) else groups:
            if group.is_initialized():
                values: list[Any] = [None] * group.world_size()
                torch.distributed.all_gather_object(values, obj, group=group.group)
                obj = op(values)
        return obj


class ParallelState:
    """The groups a quantized module synchronises its state over; `DistributedState` is a run's.

    Args:
        data_parallel_group: Ranks that hold a replica of the module; None is all ranks.
        tensor_parallel_group: Ranks that the module's tensors are split over; -1 is none.
        expert_model_parallel_group: Ranks that the experts are split over; -1 is none.
    """

    def __init__(
        self,
        data_parallel_group: ProcessGroup | int | None = None,
        tensor_parallel_group: ProcessGroup | int | None = -1,
        expert_model_parallel_group: ProcessGroup | int | None = -1,
    ) -> None:
        """Wrap the three groups."""
        self.data_parallel_group = DistributedProcessGroup(data_parallel_group)
        self.tensor_parallel_group = DistributedProcessGroup(tensor_parallel_group)
        self.expert_model_parallel_group = DistributedProcessGroup(expert_model_parallel_group)

    def __repr__(self) -> str:
        """Show the three groups."""
        groups = ", ".join(f"{name}={group}" for name, group in vars(self).items())
        return f"{type(self).__name__}({groups})"


# --------------------------------------------------------------------------------------------------
# 3. Starting and ending a run
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistributedState:
    """This process's place in a run, as `distributed_run` yields it.

    Attributes:
        rank: This process's rank in the live group.
        world_size: The number of ranks of the live group.
        device: The device this process computes on.
    """

    rank: int
    world_size: int
    device: torch.device | str

    @property
    def is_main(self) -> bool:
        """Tell whether this process is rank 0."""
        return self.rank == 0


@contextlib.contextmanager
def distributed_run(
    timeout: timedelta | None = None,
    device: torch.device | str = "cuda",
    *,
    backend: str | None = None,
) -> Iterator[DistributedState]:
    """Own the process group of a run for a block, so that its ranks finish together.

    Every rank of a launch must enter it, and gets its own `DistributedState`. A single process
    sets nothing up and is rank 0 of a run of one on its `device`. Where a body raises in a run of
    several ranks, the error is reported and the rank exits through `abort`, so that its peers fail
    within seconds instead of waiting for it.

    A `SystemExit` is a clean end, and must be one that every rank reaches (as those are that come
    out of `broadcast_from` and `all_reduce`): a rank that exits alone waits for its peers, at most
    until the timeout. A group that was set up before the block is the caller's: it is neither
    destroyed nor a reason to abort. Runs may follow one another; a nested one leaves the group to
    the outer one.

    Args:
        timeout: How long a collective of this run waits for a peer; None is torch's default.
        device: On a launch plain `"cuda"`, for `LOCAL_RANK` picks the index, or `"cpu"` together
            with `backend="gloo"`. Otherwise the device of the yielded state.
        backend: `"gloo"`, with `device="cpu"`, runs a launch on CPU ranks. No part off a launch.

    Raises:
        ValueError: On a launch, a device that the launch cannot follow.

    Example:
        >>> with distributed_run(device="cpu") as state:  # with backend="gloo" on CPU ranks
        ...     largest = all_reduce("largest", lambda: state.rank, max)
        >>> largest
        0
    """
    is_launch = is_distributed_launch()
    if is_launch:
        _check_launch_device(device, backend)
    owns_group = not is_initialized()
    if is_launch and backend is None:
        setup(timeout=timeout)
        device = torch.device(f"cuda:{local_rank()}")
    elif is_launch:
        setup(timeout=timeout, backend=backend)
        device = torch.device("cpu")
    aborts = False
    try:
        yield DistributedState(rank(), size(), device)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        aborts = owns_group and size() > 1
        _report(error)
        if aborts:
            abort()
        raise
    finally:
        # After an abort the group stays: destroying it would wait on peers.
        if owns_group and not aborts:
            _tear_down()


def _check_launch_device(device: torch.device | str, backend: str | None) -> None:
    """Refuse a device that a launch would not follow."""
    wanted = "cuda" if backend is None else "cpu"
    if str(device) == wanted:
        return
    raise ValueError(
        f"distributed_run needs device={wanted!r} with backend={backend!r} on a launch "
        f"(WORLD_SIZE={os.environ.get('WORLD_SIZE')}); it was given {str(device)!r}. LOCAL_RANK "
        'picks the index of each GPU; for CPU ranks pass backend="gloo" with device="cpu".'
    )


def _report(error: BaseException) -> None:
    """Say on one line of stderr which rank failed, before anything could wait on peers."""
    where = f"rank {rank()} of {size()}"
    # A closed stderr must not take the place of the body's error.
    with contextlib.suppress(Exception):
        text = " ".join(_describe(error).split())
        print(f"distributed_run: {where} failed: {text}", file=sys.stderr, flush=True)


def setup(timeout: timedelta | None = None, backend: str | None = None) -> None:
    """Bind this rank's CUDA device, always, and set the launch's group up if there is none.

    Every rank of the launch must call it. `distributed_run` does, and ends the group as well.

    Args:
        timeout: How long a collective waits for a peer; None is torch's default.
        backend: None is NCCL for GPU tensors and gloo for the rest. A backend that is given, such
            as `"gloo"`, serves CPU ranks: no CUDA device is bound.

    Raises:
        ValueError: The environment lacks what the rendezvous needs.
    """
    if backend is None:
        torch.cuda.set_device(local_rank())
    if not is_initialized():
        torch.distributed.init_process_group(
            backend or _GPU_RUN_BACKEND, timeout=timeout, **_rendezvous(timeout)
        )


def _rendezvous(timeout: timedelta | None) -> dict[str, Any]:
    """Return the store, rank and world size for a set-up, under a store prefix of its own.

    Without one a later set-up in the same launch, or in an attempt that the launcher starts anew,
    could read the addresses that an earlier one left in the store.
    """
    if not os.environ.get("MASTER_ADDR"):
        return {}  # torch's own error names what is missing
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    address = tuple(os.environ.get(name) for name in names)
    timeout = timeout or torch.distributed.default_pg_timeout
    store, global_rank, world_size = _launch_store(address, timeout)
    if global_rank == 0:
        prefix = _new_prefix(store, range(1, world_size), timeout)
    else:
        prefix = _prefix_of_rank_0(store, global_rank)
    prefixed = torch.distributed.PrefixStore(prefix, store)
    return {"store": prefixed, "rank": global_rank, "world_size": world_size}


def _new_prefix(store: Any, peers: Iterable[int], timeout: timedelta) -> str:
    """Make a prefix on rank 0, and tell it to every peer that asks, until each has heard."""
    prefix, deadline = f"modelopt/{uuid.uuid4()}", time.monotonic() + timeout.total_seconds()
    while peers := [peer for peer in peers if not store.check([f"{prefix}/heard by {peer}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a set-up needs every rank of the launch; ranks {peers} did not come to rank 0 "
                f"within the timeout ({timeout}). See their own output."
            )
        for peer in peers:
            # It may be a peer of an earlier attempt that asked: it is gone, and asks no more.
            if store.check([f"modelopt/question of {peer}"]):
                store.set(store.get(f"modelopt/question of {peer}").decode(), prefix)
        time.sleep(_POLL_SECONDS)
    return prefix


def _prefix_of_rank_0(store: Any, own_rank: int) -> str:
    """Ask rank 0 for its prefix, by a key that nobody used before."""
    question = f"modelopt/{uuid.uuid4()}"
    store.set(f"modelopt/question of {own_rank}", question)
    try:
        prefix: str = store.get(question).decode()
    except torch.distributed.DistStoreError as error:
        raise RuntimeError(
            f"a set-up needs every rank of the launch; rank 0 did not answer rank {own_rank} "
            "within the timeout. See its own output."
        ) from error
    store.set(f"{prefix}/heard by {own_rank}", "")
    return prefix


@functools.cache
def _launch_store(_address: tuple[str | None, ...], timeout: timedelta) -> tuple[Any, int, int]:
    """Return the rendezvous store of the launch at this address, this rank and the world size.

    Kept for good: where rank 0 serves the store itself, a store that went with its group would take
    the next run's early arrivals with it.
    """
    # The timeout bounds how long this rank connects, and later how long it waits for a key.
    launch: tuple[Any, int, int] = next(torch.distributed.rendezvous("env://", timeout=timeout))
    return launch


def cleanup() -> None:
    """Wait for every rank, then destroy the process group; nothing without one.

    The wait is skipped while an error is being handled, for peers may sit in a collective that this
    rank never reaches. A `SystemExit` counts as a clean exit.
    """
    error = sys.exc_info()[1]
    _tear_down(wait=error is None or isinstance(error, SystemExit))


def _tear_down(wait: bool = True) -> None:
    """Destroy the process group if there is one, after a barrier if `wait`."""
    if not is_initialized():
        return
    if wait:
        # A peer that is gone ends the run as well: it is the launcher's to report, not this rank's.
        with contextlib.suppress(Exception):
            barrier()
    torch.distributed.destroy_process_group()
    # A group that a model or a mesh still refers to keeps its threads. One of gloo's that is about
    # to free a tensor needs the GIL, and takes the process along if the interpreter ends first.
    time.sleep(_SETTLE_SECONDS)


def abort(exit_code: int = 1) -> NoReturn:
    """End this process at once with the traceback of the exception being handled.

    Called from an `except` block. The traceback goes to stderr and to the launcher's error file
    before any socket closes, so that torchrun tears the job down and its summary shows this rank's
    own error. No `finally`, no `atexit` hook and no destructor runs. A rank whose error is a peer's
    failure, as any collective raises it, lets the launcher see that peer end first.

    Raises:
        SystemExit: An exit being handled is re-raised, since it is none of this function's cases.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        raise error
    try:
        # Each step on its own: no failure of one keeps the rank alive or silences the others.
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(BaseException):
                stream.flush()
        if error is not None:
            if _is_of_peer(error):
                # The launcher ends this rank meanwhile, and does not take it for the root cause.
                time.sleep(_PEER_FIRST_SECONDS)
            _record_for_launcher(error)
    finally:
        os._exit(exit_code)


def _is_of_peer(error: BaseException | None) -> bool:
    """Tell whether a peer's failure is the error, or led to it."""
    chain: set[BaseException | None] = {None}
    while error not in chain:  # somebody may have closed the chain to a ring
        if getattr(error, _OF_PEER_ATTRIBUTE, False) or _is_of_transport(error):
            return True
        chain.add(error)
        error = error.__cause__ or error.__context__ if error else None
    return False


def _is_of_transport(error: BaseException | None) -> bool:
    """Tell whether a bare collective of torch broke, such as one in a model's forward."""
    # gloo raises no type of its own; its errors name its source file.
    is_of_gloo = type(error) is RuntimeError and "/gloo/" in str(error)
    return is_of_gloo or isinstance(error, torch.distributed.DistError)


def _record_for_launcher(error: BaseException) -> None:
    """Write the launcher's error file, with a description where the error's text cannot be had."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    for recorded in (error, RuntimeError(_describe(error))):
        with contextlib.suppress(BaseException):
            get_error_handler().record_exception(recorded)
            return


# --------------------------------------------------------------------------------------------------
# 4. The plan recorded on a model
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistributionPlan:
    """How a model is placed over the ranks of a run; checked when it is built.

    Every rank calibrates on its own data, so data parallelism spans the whole world.

    Attributes:
        world_size: The number of ranks that hold the model.
        ep_size: The expert-parallel degree: an MoE's routed experts are sharded over groups of
            this many ranks; 1 shards none. It divides `world_size`.
        dense: How all the rest is placed: `"replicate"`, a whole copy on every rank, or `"fsdp"`,
            FSDP2-sharded.

    Raises:
        TypeError: A degree is no int.
        ValueError: A degree is below 1, `ep_size` does not divide `world_size`, or `dense` is
            unknown.

    Example:
        >>> plan = DistributionPlan(world_size=8, ep_size=4, dense="fsdp")
        >>> plan.edp, plan.is_expert_parallel, plan.is_fsdp_dense
        (2, True, True)
    """

    world_size: int = 1
    ep_size: int = 1
    dense: str = "replicate"

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("world_size", "ep_size"):
            degree = getattr(self, name)
            if type(degree) is not int:
                raise TypeError(f"{name} must be an int; got {degree!r} ({type(degree).__name__})")
            if degree < 1:
                raise ValueError(f"{name} must be at least 1; got {degree}")
        if self.world_size % self.ep_size:
            raise ValueError(f"ep_size ({self.ep_size}) must divide world_size ({self.world_size})")
        if self.dense not in ("replicate", "fsdp"):
            raise ValueError(f"dense must be 'replicate' or 'fsdp'; got {self.dense!r}")

    @property
    def edp(self) -> int:
        """Return the number of ranks that hold a replica of each expert shard."""
        return self.world_size // self.ep_size

    @property
    def is_expert_parallel(self) -> bool:
        """Tell whether routed experts are sharded."""
        return self.ep_size > 1

    @property
    def is_fsdp_dense(self) -> bool:
        """Tell whether all but the routed experts is FSDP2-sharded."""
        return self.dense == "fsdp"


def set_distribution_plan(model: nn.Module, plan: DistributionPlan) -> None:
    """Record `plan` on `model` and on every submodule, once per model.

    Code that is handed a submodule reads the same plan. The record stays out of `state_dict()` and
    survives `copy.deepcopy`, a `__class__` swap and `fully_shard`.

    Raises:
        TypeError: `plan` is no `DistributionPlan`.
        RuntimeError: The model or a submodule already records a plan; nothing is written then.
    """
    if not isinstance(plan, DistributionPlan):
        raise TypeError(f"set_distribution_plan needs a DistributionPlan; got {plan!r}")
    modules = list(model.named_modules())
    for name, module in modules:
        recorded = vars(module).get(_PLAN_ATTRIBUTE)
        if recorded is not None:
            where = f"submodule {name!r}" if name else "the model itself"
            raise RuntimeError(
                f"A plan is recorded once per model; {where} already records {recorded}. Read it "
                "with distribution_plan(), or build the model anew."
            )
    for _, module in modules:
        vars(module)[_PLAN_ATTRIBUTE] = plan


def distribution_plan(model: nn.Module) -> DistributionPlan:
    """Return the plan that `model`, or a submodule of a planned model, records.

    Without a record the model is a single process's, `DistributionPlan()`.

    Raises:
        RuntimeError: There is no record, and the model is sharded or held in a run of several
            ranks, so it is not a single process's.
    """
    plan = getattr(model, _PLAN_ATTRIBUTE, None)
    if isinstance(plan, DistributionPlan):
        return plan
    if is_distributed_run():
        shown = f"it is held in a run of {size()} ranks"
    elif is_fsdp2_model(model) or is_dtensor_sharded(model):
        shown = "it is sharded"
    else:
        return DistributionPlan()
    raise RuntimeError(
        f"This {type(model).__name__} records no distribution plan, but {shown} (seen by rank "
        f"{rank()}). Record one with set_distribution_plan() where the model is loaded; for a "
        "module added after that, read the plan off the model it was added to."
    )


# --------------------------------------------------------------------------------------------------
# 5. Collectives that fail together
# --------------------------------------------------------------------------------------------------


def broadcast_from(label: str, fn: Callable[[], T], rank: int = 0) -> T:
    """Run `fn` on `rank` only and return its result on every rank.

    For what a rank reads for itself: its environment, its GPU, the files of its node. `broadcast`
    in contrast takes a value, and strands the peers of a rank that fails before it.

    Every rank of the run must call it, with the same `label` and `rank`; one process runs `fn`
    alone. `rank` returns its own object, every other rank a copy with its tensors on the CPU. If
    `fn` raises or its value does not serialise, `rank` raises its own error and every other rank a
    `RuntimeError` that carries it as text; a `SystemExit` is raised on every rank, with the same
    code. The next collective works after each of these.

    Ranks that meet in different collectives, or name different ranks, wait until the group's
    timeout, and then say where each was last seen; with `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch
    names that mismatch at once.

    Args:
        label: What is decided; ranks that meet under different labels fail.
        fn: Takes nothing; what it returns must serialise with `torch.save`.
        rank: The global rank that runs `fn`.

    Raises:
        ValueError: `rank` is outside the run.
        RuntimeError: A launch whose group is not up, a failure of `rank`, different labels, a
            value that does not load here, or a collective that broke (a peer that died, a timeout).
    """
    is_run = _is_run("broadcast_from", label)
    if not 0 <= rank < size():
        raise ValueError(
            f"broadcast_from({label!r}) needs a rank from 0 to {size() - 1}; got {rank!r}"
        )
    return _broadcast_result(label, fn, src=rank) if is_run else fn()


def all_reduce(label: str, fn: Callable[[], Any], combine: Callable[[list[Any]], R]) -> R:
    """Run `fn` on every rank and return `combine` of all results on every rank.

    For example `min` for the batch size that each rank's memory bears. `allreduce` in contrast
    takes a value, and strands the peers of a rank that fails before it.

    Every rank of the run must call it, with the same `label`; one process combines its own value
    alone. Each rank calls `combine` on the same values, its own loaded anew like the others',
    tensors on the CPU. If `fn` raises on a rank or its value does not serialise, that rank raises
    its own error and every other rank a `RuntimeError` that carries the lowest failing rank's as
    text; where ranks only exit, every rank raises `SystemExit`. The next collective works after
    each of these.

    Ranks that meet in different collectives wait until the group's timeout, and then say where each
    was last seen; with `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch names that mismatch at once.

    Args:
        label: What is decided; ranks that meet under different labels fail.
        fn: Takes nothing; what it returns must serialise with `torch.save`.
        combine: Takes the list of values, size() items, index = global rank.

    Raises:
        RuntimeError: A launch whose group is not up, a failure of another rank, different labels,
            a value that does not load here, or a collective that broke (a peer that died, a
            timeout).
    """
    if not _is_run("all_reduce", label):
        return combine([fn()])
    where = f"all_reduce({label!r})"
    own = _attempt(where, label, fn)

    def gather() -> dict[int, Any]:
        messages: list[Any] = [None] * size()
        torch.distributed.all_gather_object(messages, tuple(own.message))
        return dict(enumerate(messages))

    messages = _exchange(where, label, gather, own.raised)
    return combine([_value_of(where, message, src) for src, message in messages.items()])


def _broadcast_result(label: str, fn: Callable[[], T], src: int) -> T:
    """Run `fn` on `src`, send what it came to, and settle it on every rank."""
    where = f"broadcast_from({label!r})"
    own = _attempt(where, label, fn) if rank() == src else None

    def broadcast() -> dict[int, Any]:
        box = [tuple(own.message) if own else None]
        torch.distributed.broadcast_object_list(box, group_src=src)
        return {src: box[0]}

    message = _exchange(where, label, broadcast, own.raised if own else None)[src]
    value: T = own.value if own else _value_of(where, message, src)
    return value


class _Message(NamedTuple):
    """What a rank tells its peers, of plain types only, so that it always arrives and loads.

    `content` is a "plain" value as it is, the serialised value (bytes) of a "value", the text of an
    "error", or the exit code (int, str or None) of an "exit".
    """

    label: str
    kind: str
    content: Any


class _Attempt(NamedTuple):
    """What `fn` came to on this rank: the message for its peers, its value, what it raised."""

    message: _Message
    value: Any
    raised: BaseException | None


def _is_run(collective: str, label: str) -> bool:
    """Tell whether there are peers, and refuse a launch whose group is not up."""
    if not is_initialized() and is_distributed_launch():
        raise RuntimeError(
            f"{collective}({label!r}) needs the run's process group: WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']} but no group is up, so that each rank would compute its "
            "own value. Call it inside distributed_run()."
        )
    return is_distributed_run()


def _attempt(where: str, label: str, fn: Callable[[], Any]) -> _Attempt:
    """Run `fn`; whatever it raises becomes a message, since staying away would strand the peers."""
    try:
        value = fn()
        if _is_plain(value):
            return _Attempt(_Message(label, "plain", value), value, None)
        return _Attempt(_Message(label, "value", _dump(where, value)), value, None)
    except SystemExit as error:
        return _Attempt(_Message(label, "exit", _plain_exit_code(error.code)), None, error)
    # Carried to every rank, and raised on this one by _exchange.
    except BaseException as error:  # noqa: BLE001
        return _Attempt(_Message(label, "error", _describe(error)), None, error)


def _exchange(
    where: str,
    label: str,
    collective: Callable[[], dict[int, Any]],
    raised: BaseException | None,
) -> dict[int, _Message]:
    """Run the collective, then raise what this rank must raise, the most telling cause first.

    In this order: its own error that is no exit; a broken collective or differing labels; its
    peers' failures; exits. Otherwise return the messages, by their sender's rank.
    """
    _sign_in(where)
    broken = None
    try:
        messages = {src: _Message(*message) for src, message in collective().items()}
    except Exception as error:  # noqa: BLE001 -- raised below, unless a cause goes first
        broken = error
    if raised is not None and not isinstance(raised, SystemExit):
        raise raised
    if broken is not None:
        raise _broken(where, broken, _seen_elsewhere()) from broken
    _check_labels(where, label, messages)
    _raise_peers_failure(where, messages, raised)
    return messages


def _check_labels(where: str, label: str, messages: dict[int, _Message]) -> None:
    """Raise where a rank met this one under another label."""
    if any(message.label != label for message in messages.values()):
        seen = ", ".join(f"rank {src} {message.label!r}" for src, message in messages.items())
        raise RuntimeError(
            f"{where} on rank {rank()} needs the same label on every rank; it met {seen}. The "
            "ranks are out of step: make them call the same collectives in the same order."
        )


def _raise_peers_failure(
    where: str, messages: dict[int, _Message], raised: BaseException | None
) -> None:
    """Raise the lowest rank's error, or, where ranks only exit, an exit on every rank."""
    for src, message in messages.items():
        if message.kind == "error":
            raise _peer_error(f"{where} failed on rank {src}: {message.content}") from raised
    if raised is not None:
        raise raised
    for message in messages.values():
        if message.kind == "exit":
            raise SystemExit(message.content)


def _peer_error(message: str) -> RuntimeError:
    """Return the error of a rank that fails since a peer did, marked as such for `abort`."""
    error = RuntimeError(message)
    setattr(error, _OF_PEER_ATTRIBUTE, True)
    return error


def _broken(where: str, error: Exception, elsewhere: str = "") -> RuntimeError:
    """Return what a rank raises when a collective itself breaks."""
    return _peer_error(
        f"{where} broke on rank {rank()} of {size()}: {_describe(error)}.{elsewhere} A peer died, "
        "did not come within the group's timeout, or is in another collective: see its own output, "
        "or set TORCH_DISTRIBUTED_DEBUG=DETAIL."
    )


@dataclass
class _Board:
    """Where a group's ranks note which collective they have come to, for the text of an error.

    Whatever fails here leaves the collectives as they are: `store` becomes None.
    """

    store: Any
    calls: int = 0
    own_note: str = ""


# A group that is gone takes its board along.
_boards: weakref.WeakKeyDictionary[Any, _Board] = weakref.WeakKeyDictionary()


def _board() -> _Board:
    """Return the board of the default group, in its own store."""
    group: Any = torch.distributed.group.WORLD
    if group not in _boards:
        store = root = torch.distributed.distributed_c10d._get_default_store()
        while isinstance(root, torch.distributed.PrefixStore):
            root = root.underlying_store
        # Others wait for the disk, or keep every note.
        is_quick = isinstance(root, torch.distributed.TCPStore)
        board = torch.distributed.PrefixStore("modelopt/board", store) if is_quick else None
        _boards[group] = _Board(board)
    return _boards[group]


def _sign_in(where: str) -> None:
    """Note that this rank has come to a collective; it waits for no answer, which takes 20 us."""
    with contextlib.suppress(Exception):
        board = _board()
        board.calls += 1
        board.own_note = f"at {where}, call {board.calls}"
        store, board.store = board.store, None
        if store is not None:
            store.set(str(rank()), board.own_note)
            board.store = store  # it works


def _seen_elsewhere() -> str:
    """Say which ranks have not come to where this one waited, and where each was last seen."""
    notes: dict[int, str] = {}

    def read() -> None:
        with contextlib.suppress(Exception):
            board = _board()
            for peer in map(str, range(size())):
                seen = board.store.get(peer).decode() if board.store.check([peer]) else "nowhere"
                if seen != board.own_note:
                    notes[int(peer)] = seen

    # On a thread: a store whose host is stopped never answers.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_BOARD_SECONDS)
    seen = "; ".join(f"rank {peer} {note}" for peer, note in sorted(dict(notes).items()))
    return f" This is call {_board().calls}; last seen elsewhere: {seen}." if seen else ""


@contextlib.contextmanager
def _broken_as(where: str) -> Iterator[None]:
    """Raise what breaks in the block under the name of the collective."""
    try:
        yield
    except Exception as error:
        raise _broken(where, error) from error


def _describe(error: BaseException) -> str:
    """Return the type and text of `error`, also where its `__str__` raises."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _plain_exit_code(code: object) -> int | str | None:
    """Return `code` as an int or None, which are exit codes, or as the text that Python prints."""
    if code is None:
        return None
    if isinstance(code, int):
        return int(code)
    try:
        return str(code)
    # A code that does not print must still end every rank.
    except Exception as error:  # noqa: BLE001
        return f"<{type(code).__name__} that does not print: {type(error).__name__}>"


def _is_plain(value: Any, depth: int = 2) -> bool:
    """Tell whether `value` is of types that always pickle and load, as the message around it does.

    Such a small value needs no `_dump`, which takes far longer than the collective itself.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    if kind not in (dict, list, tuple) or depth == 0 or len(value) > _PLAIN_ITEMS:
        return False
    items = itertools.chain(value.keys(), value.values()) if kind is dict else value
    return all(_is_plain(item, depth - 1) for item in items)


def _dump(where: str, value: object) -> bytes:
    """Serialise `value` once: these bytes are both what is checked and what is sent."""
    try:
        # This protocol knows bytes; torch's default sends them as text, half as long again.
        return _saved(value, pickle_protocol=4).getvalue()
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{where} needs a value that serialises; fn returned {type(value).__name__} on rank "
            f"{rank()}: {_describe(error)}. Return plain data or tensors."
        ) from error


def _value_of(where: str, message: _Message, src: int) -> Any:
    """Load what rank `src` sent, its tensors onto the CPU, never onto the sender's GPU index."""
    if message.kind == "plain":
        return message.content
    try:
        # Not weights_only: the peers are this job's own ranks, and a plan is no tensor.
        payload = io.BytesIO(message.content)
        return torch.load(payload, map_location="cpu", weights_only=False)
    except Exception as error:
        raise RuntimeError(
            f"{where}: the value of rank {src} does not load on rank {rank()}: {_describe(error)}. "
            "Every rank must be able to import what the value is made of."
        ) from error


def _saved(obj: object, pickle_protocol: int = 2) -> io.BytesIO:
    """Return `obj` as `torch.save` writes it; `weights_only` loads protocol 2."""
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=pickle_protocol)
    return buffer


def _serialize(obj: object) -> torch.Tensor:
    """Return `obj` as `torch.save` writes it, as a (numel,) uint8 tensor."""
    return torch.frombuffer(_saved(obj).getbuffer(), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------
# 6. The older object helpers
# --------------------------------------------------------------------------------------------------


def broadcast(obj: T, src: int = 0, group: ProcessGroup | None = None) -> T:
    """Return the `obj` of `src` on every rank; `broadcast_from` takes a function, fails together.

    Every rank of `group` must call it. A rank that fails before it leaves the others waiting until
    the group's timeout: prefer `broadcast_from` of section 5. `src` gets its own object back, the
    others a copy with its tensors on the CPU, loaded with `weights_only=True`. An object that does
    not serialise raises on every rank.

    Args:
        obj: What `src` sends; other ranks' is ignored.
        src: A global rank of `group`.
        group: The ranks; None is all of them.

    Raises:
        ValueError: `src` is outside the group.
        RuntimeError: `src` failed, its object does not load here, or a peer died.
    """
    return _broadcast_object("broadcast", lambda: obj, src, group)


def allgather(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the list of every rank's `obj`; `all_reduce` takes a function and fails together.

    Every rank of `group` must call it. A rank that fails before it leaves the others waiting until
    the group's timeout: prefer `all_reduce` of section 5. A rank's own item is its own object, the
    others are copies with their tensors on the CPU, loaded with `weights_only=True`. An object that
    does not serialise raises on every rank.

    Args:
        obj: This rank's item.
        group: The ranks; None is all of them.

    Returns:
        size(group) items, index = group rank.

    Raises:
        RuntimeError: A peer failed or died, or its object does not load here.
    """
    if size(group) == 1:
        return [obj]
    members = _members(group)
    own = _parcel(lambda: _saved(obj).getbuffer())
    lengths = _meet("allgather", own, group, "src", members[0])
    memories = [
        own.memory if src == rank(group) else _uninitialised(length)
        for src, length in enumerate(lengths)
    ]
    # All are sent before any is loaded: one that does not load must not leave the peers waiting.
    for src, memory in enumerate(memories):
        _broadcast_memory("allgather", memory, src, group)
    return [
        obj if src == rank() else _load_payload("allgather", memory, src)
        for src, memory in zip(members, memories, strict=True)
    ]


def allreduce(obj: T, reduction: str = "sum", group: ProcessGroup | None = None) -> T:
    """Return the sum of every rank's `obj`; `all_reduce` takes a function and fails together.

    Every rank of `group` must call it, on the terms of `allgather`.

    Args:
        obj: This rank's summand: a number or a tensor on the CPU.
        reduction: `"sum"`.
        group: The ranks; None is all of them.

    Raises:
        NotImplementedError: Another reduction.
        RuntimeError: A peer failed or died, or its object does not load here.
    """
    if reduction != "sum":
        raise NotImplementedError(f"allreduce knows the reduction 'sum'; got {reduction!r}")
    return functools.reduce(operator.add, allgather(obj, group))


def master_only(func: Callable[P, T]) -> Callable[P, T]:
    """Decorate `func` to run on rank 0 only and return its result on every rank.

    Every rank must call it. Where `func` raises, the other ranks wait until the group's timeout:
    `broadcast_from` of section 5 carries the error to them.
    """

    @functools.wraps(func)
    def on_master(*args: P.args, **kwargs: P.kwargs) -> T:
        result: Any = func(*args, **kwargs) if is_master() else None
        return broadcast(result)  # type: ignore[no-any-return]

    return on_master


def _broadcast_object(where: str, fn: Callable[[], T], src: int, group: ProcessGroup | None) -> T:
    """Run `fn` on global rank `src`; return its value there, a copy of it on the others."""
    values: list[T] = []

    def make() -> memoryview:
        values.append(fn())
        return _saved(values[0]).getbuffer()

    is_src = rank() == src
    own = _parcel(make) if is_src and size(group) > 1 else _NOTHING
    lengths = _meet(where, own, group, "src", src)
    if size(group) == 1:
        return fn()
    sender = _members(group).index(src)
    memory = own.memory if is_src else _uninitialised(lengths[sender])
    _broadcast_memory(where, memory, sender, group)
    value: T = values[0] if is_src else _load_payload(where, memory, src)
    return value


# --------------------------------------------------------------------------------------------------
# 7. Bytes, tensors and state dicts
# --------------------------------------------------------------------------------------------------


def gather_bytes(
    data: bytes | bytearray | memoryview,
    dst: int,
    group: ProcessGroup | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> list[bytearray] | None:
    """Collect each rank's bytes on global rank `dst`.

    Every rank of `group` must call it, with the same `dst` and `chunk_bytes`. No pickle is
    involved. Payloads are sent and received in place: `dst` holds one copy of each, a sender makes
    none. Arguments that are wrong on one rank, or differ between ranks, raise on every rank before
    anything moves.

    Args:
        data: A contiguous bytes-like object, of any length on each rank.
        dst: A global rank of `group`.
        group: The ranks; None is all of them.
        chunk_bytes: The most bytes per rank that are in flight at a time. On a group without a CPU
            backend this bounds the device memory that stages them; otherwise none is used.

    Returns:
        On `dst` size(group) items, index = group rank; None off `dst`.

    Raises:
        TypeError: `data` is not bytes-like here.
        ValueError: `dst` is outside the group, or `chunk_bytes` below 1.
        RuntimeError: The ranks disagree, a peer passed no bytes, or a peer died.
    """
    own = _parcel(lambda: _bytes_view(data))
    gathered = _gather("gather_bytes", own, dst, group, chunk_bytes)
    if gathered is None:
        return None
    return [bytearray(own.memory) if memory is None else memory for memory in gathered]


def gather_state_dicts(
    state: Mapping[str, Any], dst: int, group: ProcessGroup | None = None
) -> Iterator[dict[str, Any]]:
    """Iterate on global rank `dst` over each rank's state dict, loaded one at a time.

    Every rank of `group` must call it, and none needs to iterate: the collective runs in the call.
    A peer's payload runs no code: it loads with `weights_only=True`, whatever the environment says.
    A state that does not serialise on one rank raises on every rank.

    Args:
        state: This rank's dict; it must serialise with `torch.save`.
        dst: A global rank of `group`.
        group: The ranks; None is all of them.

    Returns:
        On `dst` an iterator over size(group) dicts in group-rank order, tensors on the CPU, each
        payload freed once loaded; an empty one elsewhere. Its `next` raises a `RuntimeError` for a
        payload that does not load.

    Raises:
        TypeError: The state does not serialise here.
        ValueError: `dst` is outside the group.
        RuntimeError: The ranks disagree, a peer's state does not serialise, or a peer died.
    """
    where = "gather_state_dicts"
    own = _parcel(lambda: _saved_state(state))
    gathered = _gather(where, own, dst, group)
    if gathered is None:
        return iter(())
    payloads = [own.memory if memory is None else memory for memory in gathered]
    return _load_each(where, payloads, _members(group))


def broadcast_state_dict(
    state_dict_or_none: Mapping[str, torch.Tensor] | None,
    src: int,
    device: torch.device | str,
    pg: ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Return the dict of tensors of global rank `src` on every rank, each sent as a tensor.

    Every rank of `pg` must call it. What `src` cannot send raises on every rank.

    Args:
        state_dict_or_none: On `src` a dict of dense tensors, None elsewhere.
        src: A global rank of `pg`.
        device: Where this rank's tensors go.
        pg: The ranks; None is all of them.

    Returns:
        The tensors on `device`, in the order of `src`.

    Raises:
        TypeError: `src` passes something else here.
        ValueError: `src` is outside the group.
        RuntimeError: `src` failed, or a peer died.
    """
    where, device = "broadcast_state_dict", torch.device(device)
    layout = _broadcast_object(where, lambda: _layout(state_dict_or_none), src, pg)
    state: dict[str, torch.Tensor] = {}
    for name, dtype, shape in layout:
        if rank() == src and state_dict_or_none is not None:
            tensor = state_dict_or_none[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        if size(pg) > 1 and tensor.numel():
            with _broken_as(where):
                # As bytes: gloo refuses fp8, uint16 and complex dtypes.
                flat = tensor.reshape(-1).view(torch.uint8)
                _broadcast_tensor(flat, _members(pg).index(src), pg)
        state[name] = tensor
    return state


def _layout(state: object) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor, or refuse what cannot be sent as one."""
    if not isinstance(state, Mapping):
        raise TypeError(f"broadcast_state_dict needs a dict of tensors; src passed {state!r}")
    for name, tensor in state.items():
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not is_dense or tensor.is_meta or hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"broadcast_state_dict needs dense tensors; {name!r} is {type(tensor).__name__}. "
                "Gather a DTensor with full_tensor() first."
            )
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]


def _bytes_view(data: object) -> memoryview:
    """Return `data` as (numel,) bytes, without a copy."""
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"gather_bytes needs contiguous bytes on every rank; rank {rank()} passed "
            f"{type(data).__name__}. Encode it first."
        ) from error


def _saved_state(state: Mapping[str, Any]) -> memoryview:
    """Return `state` as `torch.save` writes it."""
    try:
        return _saved(state).getbuffer()
    except Exception as error:
        raise TypeError(
            f"gather_state_dicts needs a state that serialises; rank {rank()}'s does not: "
            f"{_describe(error)}. Keep tensors and plain data in it."
        ) from error


def _load_each(where: str, payloads: list[Any], members: list[int]) -> Iterator[dict[str, Any]]:
    """Load one payload at a time; popping it frees its memory once it is loaded."""
    payloads.reverse()
    for src in members:
        yield _load_payload(where, payloads.pop(), src)


def _load_payload(where: str, memory: bytearray | memoryview, src: int) -> Any:
    """Load what global rank `src` sent, its tensors onto the CPU, running none of its code."""
    try:
        file: Any = _MemoryFile(memory)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(
            f"{where}: what rank {src} sent does not load on rank {rank()}: {_describe(error)}. "
            "Send tensors and plain data, or allow its classes with "
            "torch.serialization.add_safe_globals() if you trust them."
        ) from error


class _MemoryFile(io.RawIOBase):
    """Read memory as a file; `io.BytesIO` over a bytearray would copy it."""

    def __init__(self, memory: bytearray | memoryview) -> None:
        self._memory = memoryview(memory)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._memory[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


class _Parcel(NamedTuple):
    """What this rank brings to an exchange of bytes: (numel,) bytes, or why it has none."""

    memory: memoryview
    error: BaseException | None = None


_NOTHING = _Parcel(memoryview(b""))


def _parcel(make: Callable[[], memoryview]) -> _Parcel:
    """Make the bytes; an error goes through the exchange, since raising would strand the peers."""
    try:
        return _Parcel(make())
    except Exception as error:  # noqa: BLE001 -- raised by _meet
        return _Parcel(memoryview(b""), error)


class _Header(NamedTuple):
    """What a rank says of itself before anything moves, in `_HEADER_BYTES` bytes."""

    length: int
    endpoint: int
    chunk_bytes: int
    problem: str = ""

    def pack(self) -> bytearray:
        """Return the header as bytes; the problem's text is cut to what fits."""
        numbers = struct.pack(_HEADER_NUMBERS, self.length, self.endpoint, self.chunk_bytes)
        text = self.problem.encode(errors="replace")
        return bytearray((numbers + text)[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"))

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> _Header:
        """Return the header that a rank packed."""
        data = bytes(packed.tolist())
        start = struct.calcsize(_HEADER_NUMBERS)
        text = data[start:].rstrip(b"\0").decode(errors="replace")
        length, endpoint, chunk_bytes = struct.unpack_from(_HEADER_NUMBERS, data)
        return cls(length, endpoint, chunk_bytes, text)


def _meet(
    where: str,
    own: _Parcel,
    group: ProcessGroup | None,
    role: str,
    endpoint: int,
    chunk_bytes: int = _CHUNK_BYTES,
) -> list[int]:
    """Exchange what every rank brings; return the lengths by group rank, or raise on every rank.

    `endpoint` is the global rank that sends or receives all, `role` its parameter's name. In this
    order: this rank's own error; a broken exchange; a peer's error; ranks that disagree; an
    endpoint or chunks that cannot be.
    """
    if rank(group) < 0:
        raise ValueError(f"{where} is for the ranks of its group only; rank {rank()} is none")
    header, error = _own_header(where, own, role, endpoint, chunk_bytes)
    broken = None
    try:
        headers = _exchange_headers(header, group)
    except Exception as exception:  # noqa: BLE001 -- raised below, unless a cause goes first
        broken = exception
    if error is not None:
        raise error
    if broken is not None:
        raise _broken(where, broken) from broken
    _check_headers(where, role, headers, _members(group))
    return [header.length for header in headers]


def _own_header(
    where: str, own: _Parcel, role: str, endpoint: int, chunk_bytes: int
) -> tuple[bytearray, BaseException | None]:
    """Pack this rank's header; what does not pack is an error that the header tells instead."""
    error = own.error
    if error is None:
        try:
            return _Header(len(own.memory), endpoint, chunk_bytes).pack(), None
        except struct.error:
            error = TypeError(
                f"{where} needs whole numbers; rank {rank()} passed {role}={endpoint!r}, "
                f"chunk_bytes={chunk_bytes!r}"
            )
    return _Header(0, 0, 0, _describe(error)).pack(), error


def _exchange_headers(header: bytearray, group: ProcessGroup | None) -> list[_Header]:
    """Return every rank's header by group rank, this rank's own without peers."""
    own = torch.frombuffer(header, dtype=torch.uint8)
    if size(group) == 1:
        return [_Header.unpack(own)]
    own = _transported(own, group)
    packed = [torch.empty_like(own) for _ in range(size(group))]
    torch.distributed.all_gather(packed, own, group=group)
    return [_Header.unpack(one) for one in packed]


def _check_headers(where: str, role: str, headers: list[_Header], members: list[int]) -> None:
    """Raise what the headers of all ranks show, which is the same on every rank."""
    for src, header in zip(members, headers, strict=True):
        if header.problem:
            raise _peer_error(f"{where} failed on rank {src}: {header.problem}")
    if len({header[1:] for header in headers}) > 1:
        passed = ", ".join(
            f"rank {src} {role}={header.endpoint}, chunk_bytes={header.chunk_bytes}"
            for src, header in zip(members, headers, strict=True)
        )
        raise RuntimeError(f"{where} needs the same arguments on every rank; got {passed}")
    endpoint, chunk_bytes = headers[0].endpoint, headers[0].chunk_bytes
    if endpoint not in members:
        raise ValueError(
            f"{where} needs a {role} in the group, whose global ranks are {members}; got {endpoint}"
        )
    if chunk_bytes < 1:
        raise ValueError(f"{where} needs a chunk_bytes of at least 1; got {chunk_bytes}")


def _gather(
    where: str,
    own: _Parcel,
    dst: int,
    group: ProcessGroup | None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> list[bytearray | None] | None:
    """Move every rank's bytes to `dst`: a list by group rank there, None in its own place."""
    lengths = _meet(where, own, group, "dst", dst, chunk_bytes)
    if len(lengths) == 1:
        return [None]
    with _broken_as(where):
        if rank() == dst:
            return _receive(lengths, chunk_bytes, group)
        for part in _chunks(own.memory, chunk_bytes):
            torch.distributed.send(_transported(part, group), dst=dst, group=group)
    return None


def _receive(
    lengths: list[int], chunk_bytes: int, group: ProcessGroup | None
) -> list[bytearray | None]:
    """Receive from all peers at once, a chunk of each at a time, into the memory returned."""
    own = rank(group)
    received = [
        None if src == own else _uninitialised(length) for src, length in enumerate(lengths)
    ]
    streams = [_chunks(memory or b"", chunk_bytes) for memory in received]
    for turn in itertools.zip_longest(*streams):
        parts = {src: part for src, part in enumerate(turn) if part is not None}
        buffers = {src: _transported(part, group, is_filled=False) for src, part in parts.items()}
        works: list[Any] = [
            torch.distributed.irecv(buffer, group_src=src, group=group)
            for src, buffer in buffers.items()
        ]
        for work in works:
            work.wait()
        for src, part in parts.items():
            _copy_back(buffers[src], part)
    return received


def _broadcast_memory(
    where: str, memory: bytearray | memoryview, src: int, group: ProcessGroup | None
) -> None:
    """Send the bytes of group rank `src` into the memory of every other rank, chunk by chunk."""
    with _broken_as(where):
        for part in _chunks(memory, _CHUNK_BYTES):
            _broadcast_tensor(part, src, group)


def _broadcast_tensor(tensor: torch.Tensor, src: int, group: ProcessGroup | None) -> None:
    """Send the (numel,) bytes of group rank `src` into the tensor of every other rank."""
    is_src = rank(group) == src
    buffer = _transported(tensor, group, is_filled=is_src)
    torch.distributed.broadcast(buffer, group_src=src, group=group)
    if not is_src:
        _copy_back(buffer, tensor)


def _chunks(memory: bytes | bytearray | memoryview, chunk_bytes: int) -> Iterator[torch.Tensor]:
    """View memory as (numel,) uint8 tensors of at most `chunk_bytes`."""
    view = memoryview(memory)
    for start in range(0, len(view), chunk_bytes):
        yield _as_tensor(view[start : start + chunk_bytes])


def _as_tensor(memory: bytearray | memoryview) -> torch.Tensor:
    """View memory as a (numel,) uint8 tensor."""
    with warnings.catch_warnings():
        # A caller's bytes are read-only; what is sent is not written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _transported(
    tensor: torch.Tensor, group: ProcessGroup | None, is_filled: bool = True
) -> torch.Tensor:
    """Return `tensor`, or a copy (empty unless filled) where the group cannot carry its device."""
    device = _transport_device(torch.distributed.get_backend_config(group), tensor.device)
    if device == tensor.device:
        return tensor
    return tensor.to(device) if is_filled else torch.empty_like(tensor, device=device)


def _transport_device(backend_config: str, device: torch.device) -> torch.device:
    """Return the device that a group of these backends carries tensors of `device` on."""
    if f"{device.type}:" in backend_config:
        return device
    if "cpu:" in backend_config:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _copy_back(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a received buffer to where it belongs, unless it was received in place."""
    if buffer is not tensor:
        tensor.copy_(buffer)


def _members(group: ProcessGroup | None) -> list[int]:
    """Return the group's global ranks, index = group rank."""
    return torch.distributed.get_process_group_ranks(group) if is_initialized() else [0]


def _uninitialised(length: int) -> bytearray:
    """Return a bytearray of this length without zeroing it first, as `bytearray(length)` would."""
    memory: bytearray = _new_bytearray(None, length)
    return memory


# --------------------------------------------------------------------------------------------------
# 8. How a model is laid out
# --------------------------------------------------------------------------------------------------


def is_fsdp2_model(model: nn.Module) -> bool:
    """Tell whether `model` or any submodule is wrapped with FSDP2's `fully_shard`."""
    if not is_available():
        return False
    # Imported here: it costs most of a second on top of torch.
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_dtensor_sharded(model: nn.Module) -> bool:
    """Tell whether any parameter or buffer of `model` is a `DTensor`."""
    if not is_available():
        return False
    # Imported here: it costs most of a second on top of torch.
    from torch.distributed.tensor import DTensor

    tensors = [*model.parameters(), *model.buffers()]
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def fsdp2_wrap(
    model: nn.Module,
    shard_root: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
) -> list[nn.Module]:
    """Shard a causal LM with FSDP2 and return its decoder layers; the old path of this function.

    It belongs to loading a model: `modelopt.torch.utils.plugins.model_load_utils.fsdp2_wrap`, which
    has the same parameters, says what it does.
    """
    # Imported here: that module imports this one.
    from modelopt.torch.utils import fsdp2_utils

    return fsdp2_utils.fsdp2_wrap(model, shard_root, mp_policy, cpu_offload)


# --------------------------------------------------------------------------------------------------
# 9. Calibrating on every rank
# --------------------------------------------------------------------------------------------------


def shard_dataloader(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Return a loader over this rank's share, with every non-sampler setting of `loader`.

    Batch counts are equal on every rank, since unequal ones hang the collectives of a forward, at
    the price of up to `world_size - 1` repeated samples.

    A map-style dataset is shared out by a `DistributedSampler`. A loader that shuffles keeps
    shuffling, in one order shared by all ranks, the same in every epoch until `set_epoch` is called
    on the returned loader's sampler.

    Of an `IterableDataset` each rank takes every `world_size`-th sample of its own copy of the
    stream, which must be deterministic; with workers, each takes its share of the rank's share. A
    dataset that splits itself by `get_worker_info()` would be split twice: load it with
    `num_workers=0`. An empty stream is a `ValueError` when it is iterated.

    Args:
        loader: A `torch.utils.data.DataLoader`.
        rank: The share to take, from 0.
        world_size: The number of shares.

    Raises:
        TypeError: `loader` is no `DataLoader`.
        ValueError: `rank` is outside the world; the dataset, or with `drop_last` every share, is
            empty; the loader is sharded already, or samples or iterates in a way of its own, which
            a share could not keep.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"shard_dataloader needs a DataLoader; got {type(loader).__name__}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be from 0 to world_size - 1; got rank {rank!r} of world_size {world_size!r}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"shard_dataloader cannot keep how {type(loader).__name__} iterates; pass a plain "
            "DataLoader over the same dataset"
        )
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, rank, world_size)
    return _shard_samples(loader, rank, world_size)


def _shard_samples(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Share a map-style dataset out by a `DistributedSampler`."""
    _check_sampling(loader)
    dataset: Any = loader.dataset
    if not len(dataset):
        raise ValueError("shard_dataloader needs at least one sample; the dataset is empty")
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, drop_last=False
    )
    sharded = _with_settings_of(loader, dataset, sampler=sampler)
    if not len(sharded):
        raise ValueError(
            f"drop_last drops every sample of a share: {len(dataset)} samples on {world_size} "
            f"ranks fill no batch of {loader.batch_size}. Use drop_last=False or a smaller batch."
        )
    return sharded


def _check_sampling(loader: DataLoader[Any]) -> None:
    """Refuse a sampler that a `DistributedSampler` over the dataset cannot stand in for."""
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise ValueError("the loader is sharded already: its sampler is a DistributedSampler")
    has_own_batches = loader.batch_sampler is not None and (
        type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None
    )
    is_plain = type(sampler) in (SequentialSampler, RandomSampler)
    if has_own_batches or not is_plain or not _covers_dataset(sampler, loader.dataset):
        name = type(loader.batch_sampler if has_own_batches else sampler).__name__
        raise ValueError(
            f"shard_dataloader cannot keep the loader's own {name}, and calibrating on other "
            "samples would go unnoticed. Use shuffle and batch_size, on a Subset if need be."
        )


def _covers_dataset(sampler: Any, dataset: Any) -> bool:
    """Tell whether a plain sampler draws each sample of `dataset` once."""
    if getattr(sampler, "replacement", False):
        return False
    is_whole = sampler.data_source is dataset
    return is_whole and getattr(sampler, "num_samples", len(dataset)) == len(dataset)


def _shard_stream(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Share an `IterableDataset` out by position."""
    stream: Any = loader.dataset
    if isinstance(stream, _StreamShare):
        raise ValueError("the loader is sharded already: its dataset is a share of a stream")
    return _with_settings_of(loader, _StreamShare(stream, rank, world_size))


def _with_settings_of(
    loader: DataLoader[Any], dataset: Dataset[Any], **sampling: Any
) -> DataLoader[Any]:
    """Return a loader over `dataset` with every setting of `loader` that does not sample."""
    own = {"self", "dataset", "sampler", "batch_sampler", "shuffle"}
    # Read off the signature, so that a setting that a later torch adds is forwarded as well.
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in own]
    settings = {name: getattr(loader, name) for name in names}
    return DataLoader(dataset, **settings, **sampling)


class _StreamShare(IterableDataset[Any]):
    """Every `world_size`-th sample of a stream, and of those this worker's.

    The stream goes by rounds of `world_size` samples, one for each rank; workers take the rounds in
    turn. A last round that lacks samples repeats its last one, so that the shares are equal.
    """

    def __init__(self, stream: IterableDataset[Any], rank: int, world_size: int) -> None:
        self.stream = stream
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        position = -1
        for position, sample in enumerate(self.stream):
            round_, place = divmod(position, self.world_size)
            if place == self.rank and round_ % workers == worker_id:
                yield sample
        if position < 0:
            raise ValueError("calibration needs at least one sample; the stream is empty")
        round_, place = divmod(position, self.world_size)
        if place < self.rank and round_ % workers == worker_id:
            yield sample


def distributed_forward_loop(
    model: nn.Module,
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    ep_mesh: DeviceMesh | None = None,
) -> Callable[..., None]:
    """Return the `forward_loop` that `mtq.quantize(model, config, forward_loop)` takes.

    The loop ignores the module it is handed and calls `model`, so that hooks run: FSDP2 and expert
    parallelism gather in them. It runs without gradients over every batch: a mapping as keyword
    arguments, a tuple or list as positional ones, a tensor as one. `config.use_cache` is off
    meanwhile, in a nested `text_config` too. Progress is shown on rank 0. The forwards of sharded
    experts, which quantizer insertion may drop, are installed again before the first one.

    Where the forwards of a run communicate (an expert-parallel or FSDP2-dense plan), every rank
    must call the loop, and ranks whose loaders have different lengths all fail before the first
    forward. A rank that fails in a forward leaves its peers waiting, until `distributed_run` aborts
    it.

    Args:
        model: The top-level model; its plan is read with `distribution_plan`.
        dataloader: This rank's share, such as `shard_dataloader` returns.
        device: Where batches move to, nested containers included; None leaves them.
        ep_mesh: The mesh that the experts are sharded over, as `shard_experts` took it; for an
            expert-parallel plan only.

    Raises:
        ValueError: An expert-parallel model without its `ep_mesh`, a mesh of another size than the
            plan's `ep_size`, or a mesh for any other model.
        RuntimeError: The model records no plan in a run of several ranks; from the loop, its
            experts are not sharded over `ep_mesh`, or quantizers of a rank's experts saw no token
            of all the data while others' did (on every rank, with the names).

    Example:
        >>> loop = distributed_forward_loop(nn.Linear(4, 2), DataLoader(torch.ones(8, 4)))
        >>> loop()
    """
    plan = distribution_plan(model)
    _check_ep_mesh(plan, ep_mesh)

    def forward_loop(_module: nn.Module | None = None) -> None:
        from tqdm import tqdm

        if is_distributed_run() and (plan.is_expert_parallel or plan.is_fsdp_dense):
            _check_batch_counts(dataloader)
        if ep_mesh is not None:
            # Imported here: the plugin imports this module.
            from modelopt.torch.utils.plugins.expert_parallel import (
                install_expert_parallel_forwards,
            )

            install_expert_parallel_forwards(model, ep_mesh)
        with torch.no_grad(), _use_cache_off(getattr(model, "config", None)):
            for batch in tqdm(dataloader, desc="Calibrating", disable=not is_master()):
                _forward(model, batch if device is None else _to_device(batch, device))
        if ep_mesh is not None:
            _check_experts_saw_tokens(model)

    return forward_loop


def _check_ep_mesh(plan: DistributionPlan, ep_mesh: DeviceMesh | None) -> None:
    """Require the mesh of an expert-parallel plan, and none for any other."""
    if not plan.is_expert_parallel and ep_mesh is not None:
        raise ValueError(f"ep_mesh must be None for a model that is not expert-parallel ({plan})")
    if plan.is_expert_parallel and (ep_mesh is None or ep_mesh.size() != plan.ep_size):
        given = "none" if ep_mesh is None else f"one of size {ep_mesh.size()}"
        raise ValueError(
            f"an expert-parallel model needs the ep_mesh its experts are sharded over, of size "
            f"ep_size ({plan.ep_size}); rank {rank()} was given {given}"
        )


def _check_batch_counts(dataloader: DataLoader[Any]) -> None:
    """Raise on every rank where ranks would run different numbers of forwards."""

    def batches() -> int | None:
        try:
            return len(dataloader)
        except (TypeError, NotImplementedError):  # a stream has no length
            return None

    counts = all_reduce("calibration batches", batches, list)
    if len({count for count in counts if count is not None}) > 1:
        raise RuntimeError(
            "every rank must run the same number of batches, since the forwards communicate; ranks "
            f"0 to {len(counts) - 1} have {counts}. Share the data out with shard_dataloader()."
        )


def _check_experts_saw_tokens(model: nn.Module) -> None:
    """Raise on every rank where quantizers of a rank's experts saw no token while others' did.

    Such a rank has no scale to bring to a collective in which its peers would wait for it.
    """
    idle = all_reduce("experts without tokens", lambda: _idle_experts(model), list)
    idle_everywhere = set.intersection(*map(set, idle))
    names = [
        f"{name!r} of rank {src}"
        for src, names in enumerate(idle)
        for name in names
        if name not in idle_everywhere
    ]
    if names:
        raise RuntimeError(
            "quantizers of sharded experts need a token on every rank, since they synchronise; "
            f"none came to {', '.join(names)}. Calibrate on more data, or plan a smaller ep_size."
        )


def _idle_experts(model: nn.Module) -> list[str]:
    """Return by name the sharded experts that got no row and hold quantizers that collect."""
    return [
        name
        for name, module in model.named_modules()
        if vars(module).get("_rows_seen") == 0
        # How a quantizer of nvidia-modelopt, the larger library, says that it collects.
        and any(getattr(child, "_if_calib", False) for child in module.children())
    ]


def _forward(model: nn.Module, batch: Any) -> None:
    """Run the model on one batch."""
    if isinstance(batch, torch.Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        raise TypeError(
            "a batch must be a mapping, a tuple, a list or a tensor; rank "
            f"{rank()} got {type(batch).__name__}. Collate it into one of these."
        )


def _to_device(value: Any, device: torch.device | str) -> Any:
    """Move the tensors of `value` to `device`, those in nested containers too."""
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_to_device(item, device) for item in value)
    return value


@contextlib.contextmanager
def _use_cache_off(config: Any) -> Iterator[None]:
    """Turn `use_cache` off on `config` and on a nested `text_config`, and put back what was there.

    A key-value cache costs memory for nothing here, and some models return one that hooks choke on.
    """
    with contextlib.ExitStack() as stack:
        for owner in (config, getattr(config, "text_config", None)):
            if owner is not None:
                stack.enter_context(_attribute_off(owner, "use_cache"))
        yield


@contextlib.contextmanager
def _attribute_off(owner: Any, name: str) -> Iterator[None]:
    """Read `owner.name` as False for the block, whether it is set, absent or read-only."""
    own = vars(owner)
    was_own, before, owner_class = name in own, getattr(owner, name, None), type(owner)
    try:
        setattr(owner, name, False)
    except (AttributeError, TypeError):
        # Read-only: a property of a subclass stands before whatever the class has.
        off = property(lambda _: False)
        off_class = type(owner_class.__name__, (owner_class,), {name: off})
        object.__setattr__(owner, "__class__", off_class)
    try:
        yield
    finally:
        if type(owner) is not owner_class:
            object.__setattr__(owner, "__class__", owner_class)
        elif was_own or name not in own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


# --------------------------------------------------------------------------------------------------
# 10. One process of a node
# --------------------------------------------------------------------------------------------------


class FileLock:
    """Let one process of a node do a job once, by a lock file that only one can create.

    Entering tries once; `try_acquire` and `wait` tell and wait for the others. With `all_acquire`,
    entering waits until it is this process's turn.

    Args:
        lockfile_path: The file to create; the processes share its folder.
        all_acquire: Whether entering waits for its turn.
        poll_time: Seconds between two looks at the file.
    """

    def __init__(
        self,
        lockfile_path: str | os.PathLike[str],
        all_acquire: bool = False,
        poll_time: float = 0.25,
    ) -> None:
        """Remember the settings; nothing is created yet."""
        self.lockfile_path = Path(lockfile_path)
        self.all_acquire = all_acquire
        self.poll_time = poll_time
        self._is_acquired = False

    def try_acquire(self) -> bool:
        """Create the lock file; tell whether this process got it."""
        try:
            os.close(os.open(self.lockfile_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        self._is_acquired = True
        return True

    def wait(self) -> None:
        """Wait until the lock file is gone.

        Raises:
            TimeoutError: The file was still there after 30 minutes, such as one that a killed
                process left.
        """
        deadline = time.monotonic() + _LOCK_WAIT_SECONDS
        while self.lockfile_path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.lockfile_path} was held for {_LOCK_WAIT_SECONDS:.0f} s. Remove it if "
                    "the process that made it is gone."
                )
            time.sleep(self.poll_time)

    def release(self) -> None:
        """Remove the lock file, if this process acquired it."""
        if self._is_acquired:
            self._is_acquired = False
            self.lockfile_path.unlink()

    def __enter__(self) -> FileLock:
        """Try once, or with `all_acquire` until it is this process's turn."""
        while not self.try_acquire() and self.all_acquire:
            self.wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock if this process holds it."""
        self.release()
