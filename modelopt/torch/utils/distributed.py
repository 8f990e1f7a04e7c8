# SPDX-License-Identifier: Apache-2.0
"""What a torchrun-launched quantization script runs on: its ranks decide, fail and finish together.

1. Where am I: `rank`, `size`, `is_distributed_launch`, `is_distributed_run`, ...
2. Groups a module works in: `DistributedProcessGroup`, `ParallelState`
3. Starting and ending a run: `distributed_run`, `setup`, `cleanup`, `abort`
4. The plan recorded on a model: `DistributionPlan`, `set_distribution_plan`, `distribution_plan`
5. Collectives that fail together: `broadcast_from`, `all_reduce`
6. How a model is laid out: `is_fsdp2_model`, `is_dtensor_sharded`
7. Calibrating on every rank: `shard_dataloader`, `distributed_forward_loop`
8. One process of a node: `FileLock`

The one rule: *queries never communicate; every rank reaches every other call in the same order.*

A **launch** is what the environment says (`WORLD_SIZE` > 1), readable before any process group
exists. A **run** is what is live: a process group is initialised with more than one rank. NCCL
serves GPU ranks, gloo serves CPU ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

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

# Object collectives and CPU tensors go over gloo, GPU tensors over NCCL, in one group.
_GPU_RUN_BACKEND = "cpu:gloo,cuda:nccl"
# An instance attribute: it outlives a `__class__` swap and stays out of `state_dict()`.
_PLAN_ATTRIBUTE = "_modelopt_distribution_plan"
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

    Without one a later set-up in the same launch could read the addresses that an earlier one left
    in the store. The store itself counts each rank's set-ups, so that ranks agree on the prefix.
    """
    if not os.environ.get("MASTER_ADDR"):
        return {}  # torch's own error names what is missing
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    address = tuple(os.environ.get(name) for name in names)
    timeout = timeout or torch.distributed.default_pg_timeout
    store, global_rank, world_size = _launch_store(address, timeout)
    count = store.add(f"modelopt/set-ups of rank {global_rank}", 1)
    prefixed = torch.distributed.PrefixStore(f"modelopt/run {count}", store)
    return {"store": prefixed, "rank": global_rank, "world_size": world_size}


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


def abort(exit_code: int = 1) -> NoReturn:
    """End this process at once with the traceback of the exception being handled.

    Called from an `except` block. The traceback goes to stderr and to the launcher's error file
    before any socket closes, so that torchrun tears the job down and its summary shows this rank's
    own error. No `finally`, no `atexit` hook and no destructor runs.

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
            _record_for_launcher(error)
    finally:
        os._exit(exit_code)


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
    timeout; with `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch names that mismatch at once.

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

    Ranks that meet in different collectives wait until the group's timeout; with
    `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch names that mismatch at once.

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
    return combine([_load(where, message.content, src) for src, message in messages.items()])


def _broadcast_result(label: str, fn: Callable[[], T], src: int) -> T:
    """Run `fn` on `src`, send what it came to, and settle it on every rank."""
    where = f"broadcast_from({label!r})"
    own = _attempt(where, label, fn) if rank() == src else None

    def broadcast() -> dict[int, Any]:
        box = [tuple(own.message) if own else None]
        torch.distributed.broadcast_object_list(box, group_src=src)
        return {src: box[0]}

    message = _exchange(where, label, broadcast, own.raised if own else None)[src]
    value: T = own.value if own else _load(where, message.content, src)
    return value


class _Message(NamedTuple):
    """What a rank tells its peers, of plain types only, so that it always arrives and loads.

    `content` is the serialised value (bytes) of a "value", the text of an "error", or the exit code
    (int, str or None) of an "exit".
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
    broken = None
    try:
        messages = {src: _Message(*message) for src, message in collective().items()}
    except Exception as error:  # noqa: BLE001 -- raised below, unless a cause goes first
        broken = error
    if raised is not None and not isinstance(raised, SystemExit):
        raise raised
    if broken is not None:
        raise RuntimeError(
            f"{where} broke on rank {rank()} of {size()}: {_describe(broken)}. A peer died, did "
            "not come within the group's timeout, or is in another collective: see its own output, "
            "or set TORCH_DISTRIBUTED_DEBUG=DETAIL."
        ) from broken
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
            raise RuntimeError(f"{where} failed on rank {src}: {message.content}") from raised
    if raised is not None:
        raise raised
    for message in messages.values():
        if message.kind == "exit":
            raise SystemExit(message.content)


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


def _dump(where: str, value: object) -> bytes:
    """Serialise `value` once: these bytes are both what is checked and what is sent."""
    try:
        return _saved(value).getvalue()
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{where} needs a value that serialises; fn returned {type(value).__name__} on rank "
            f"{rank()}: {_describe(error)}. Return plain data or tensors."
        ) from error


def _load(where: str, payload: bytes, src: int) -> Any:
    """Load what rank `src` sent, its tensors onto the CPU, never onto the sender's GPU index."""
    try:
        # Not weights_only: the peers are this job's own ranks, and a plan is no tensor.
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
    except Exception as error:
        raise RuntimeError(
            f"{where}: the value of rank {src} does not load on rank {rank()}: {_describe(error)}. "
            "Every rank must be able to import what the value is made of."
        ) from error


def _saved(obj: object) -> io.BytesIO:
    """Return `obj` as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer


def _serialize(obj: object) -> torch.Tensor:
    """Return `obj` as `torch.save` writes it, as a (numel,) uint8 tensor."""
    return torch.frombuffer(_saved(obj).getbuffer(), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------
# 6. How a model is laid out
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


# --------------------------------------------------------------------------------------------------
# 7. Calibrating on every rank
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
    meanwhile, in a nested `text_config` too. Progress is shown on rank 0.

    Where the forwards of a run communicate (an expert-parallel or FSDP2-dense plan), every rank
    must call the loop, and ranks whose loaders have different lengths all fail before the first
    forward. A rank that fails in a forward leaves its peers waiting, until `distributed_run` aborts
    it.

    Args:
        model: The top-level model; its plan is read with `distribution_plan`.
        dataloader: This rank's share, such as `shard_dataloader` returns.
        device: Where batches move to, nested containers included; None leaves them.
        ep_mesh: The mesh that the experts are sharded over, for an expert-parallel plan only.

    Raises:
        ValueError: An expert-parallel model without its `ep_mesh`, a mesh of another size than the
            plan's `ep_size`, or a mesh for any other model.
        RuntimeError: The model records no plan in a run of several ranks.

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
        with torch.no_grad(), _use_cache_off(getattr(model, "config", None)):
            for batch in tqdm(dataloader, desc="Calibrating", disable=not is_master()):
                _forward(model, batch if device is None else _to_device(batch, device))

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
# 8. One process of a node
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
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Release the lock if this process holds it."""
        self.release()
