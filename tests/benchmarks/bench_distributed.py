# SPDX-License-Identifier: Apache-2.0
"""Measure `modelopt.torch.utils.distributed` beside its peers, in one run on gloo CPU ranks.

    python tests/benchmarks/bench_distributed.py [--quick] [--ranks 2 4] [--output FILE]

Ours and its peers take turns with the same payload. Absolute times are those of a machine that may
be busy: compare the rows of a case. A case whose contenders return different results fails the run.
Peak memory is measured on Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import operator
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import collective_utils
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.multiprocessing.spawn import spawn

from modelopt.torch.utils import distributed as mdist

# Turns of each contender, by the bytes of a payload; 0 is a small dict, such as a plan.
_TURNS = {0: 500, 1 << 10: 200, 1 << 16: 100, 1 << 20: 30, 1 << 24: 12, 1 << 28: 5}
_QUICK_TURNS = {0: 100, 1 << 10: 30, 1 << 20: 10, 1 << 24: 3}
_IMPORT_TURNS, _QUICK_IMPORT_TURNS = 15, 2
# Below this, what the process allocates besides drowns the payload.
_MEMORY_FROM_BYTES = 1 << 24
_TIMEOUT = timedelta(minutes=10)
_Runs = dict[str, Callable[[], Any]]
_HEADER = """\
Time of the slowest rank; "ours/peer" below 1 means that ours is faster. "Over bare" is what a
contender takes longer than the first peer. Memory is the peak over what was there before the call:
on a destination in units of all that it receives, its own included, on a sender of its payload
(under `all_reduce` every rank is both).

| contender | ranks | payload | median, ms | minimum, ms | ours/peer, medians | ours/peer, minima \
| over bare, us: median, minimum | memory: destination | sender |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


@dataclass(frozen=True)
class _Case:
    """One of ours beside its peers; `consume` is what the caller does with a result, timed too."""

    num_bytes: int  # of one rank's payload
    runs: _Runs  # ours first, then the bare collective
    num_received: int  # payloads that a destination ends up with
    dst: int = 0  # a rank that receives; the others send
    consume: Callable[[Any], Any] = lambda result: result


def _cases(num_bytes: int) -> Iterator[_Case]:
    """Make the cases of one size, one at a time."""
    plan = {"world_size": 8, "ep_size": 4, "dense": "fsdp", "batch": 16 - dist.get_rank()}
    payload = _payload(num_bytes)
    yield from _value_cases(payload or plan, num_bytes)
    if payload:
        yield _bytes_case(payload)
        yield _state_case(payload)


def _value_cases(value: Any, num_bytes: int) -> Iterator[_Case]:
    """Make the cases of `broadcast_from` and `all_reduce`."""
    pg: Any = dist.group.WORLD
    num_ranks = dist.get_world_size()
    dcp = _DistWrapper(None, use_dist=True, coordinator_rank=0)
    last = operator.itemgetter(-1)

    def get() -> Any:
        return value

    def bare_broadcast() -> Any:
        box = [value if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    broadcasts: _Runs = {
        "broadcast_from": lambda: mdist.broadcast_from("value", get),
        "broadcast_object_list": bare_broadcast,
        "collective_utils.broadcast": lambda: collective_utils.broadcast(get, pg=pg),
        "DCP broadcast": lambda: dcp.broadcast("value", get),
    }
    yield _Case(num_bytes, broadcasts, num_received=1, dst=num_ranks - 1)
    all_reduces: _Runs = {
        "all_reduce": lambda: mdist.all_reduce("value", get, last),
        "all_gather_object": lambda: last(_all_gather_object(value)),
        "collective_utils.all_gather": lambda: last(collective_utils.all_gather(get, pg=pg)),
        "DCP all_gather": lambda: last(dcp.all_gather("value", get)),
        "DCP all_reduce": lambda: dcp.all_reduce("value", get, last),
    }
    yield _Case(num_bytes, all_reduces, num_ranks)


def _bytes_case(payload: bytes) -> _Case:
    """Make the case of `gather_bytes`."""
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def send_recv(new: Callable[[int], Any]) -> list[Any] | None:
        if dist.get_rank() > 0:
            dist.send(own, dst=0)
            return None
        received = [new(len(payload)) for _ in range(1, dist.get_world_size())]
        for src, memory in enumerate(received, start=1):
            dist.recv(torch.frombuffer(memory, dtype=torch.uint8), src=src)
        return [bytearray(payload), *received]

    def not_zeroed(num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data

    runs: _Runs = {
        "gather_bytes": lambda: mdist.gather_bytes(payload, dst=0),
        "send, recv into bytearrays": lambda: send_recv(bytearray),
        "send, recv into torch.empty": lambda: send_recv(not_zeroed),
        "gather_object of bytes": lambda: _gather_object(payload),
    }
    return _Case(len(payload), runs, dist.get_world_size())


def _state_case(payload: bytes) -> _Case:
    """Make the case of `gather_state_dicts`, whose dicts are dropped one by one."""
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16)
    state = {f"layers.{i}.weight": part.clone() for i, part in enumerate(tensor.chunk(8))}
    runs: _Runs = {
        "gather_state_dicts": lambda: mdist.gather_state_dicts(state, dst=0),
        "gather_object of tensors": lambda: _gather_object(state) or [],
    }
    drop_each = deque[Any](maxlen=0).extend
    return _Case(len(payload), runs, dist.get_world_size(), consume=drop_each)


def _all_gather_object(value: object) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _gather_object(value: object) -> list[Any] | None:
    """Return every rank's value on rank 0."""
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def _payload(num_bytes: int) -> bytes:
    """Return this rank's bytes, of a period that divides no chunk."""
    period = bytes((dist.get_rank() + index) % 251 for index in range(251))
    return (period * (num_bytes // len(period) + 1))[:num_bytes]


def _run_rank(rank: int, num_ranks: int, folder: Path, turns: dict[int, int]) -> None:
    """Measure every case as one rank; rank 0 reports the rows."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group("gloo", store, timeout=_TIMEOUT, rank=rank, world_size=num_ranks)
    for num_bytes, num_turns in turns.items():
        for case in _cases(num_bytes):
            _check(case)
            times = _times(case, num_turns)
            has_memory = sys.platform == "linux" and num_bytes >= _MEMORY_FROM_BYTES
            memory = {name: _memory(case, name) for name in case.runs} if has_memory else {}
            if rank == 0:
                _report(folder, _rows(times, str(num_ranks), _size_text(num_bytes), memory))
    dist.destroy_process_group()


def _check(case: _Case) -> None:
    """Raise where a contender returns another result than ours; this warms all of them up too."""
    ours, *peers = case.runs
    expected = case.runs[ours]()
    expected = list(expected) if isinstance(expected, Iterator) else expected
    for peer in peers:
        if not _is_same(expected, case.runs[peer]()):
            raise RuntimeError(f"{ours} and {peer} differ on rank {dist.get_rank()}")


def _is_same(ours: Any, peer: Any) -> bool:
    """Compare results, tensors in containers included."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == peer.dtype and torch.equal(ours, peer)
    if isinstance(ours, dict):
        return _is_same([*ours], [*peer]) and _is_same([*ours.values()], [*peer.values()])
    if isinstance(ours, list):
        return len(ours) == len(peer) and all(map(_is_same, ours, peer))
    return bool(ours == peer)


def _times(case: _Case, num_turns: int) -> dict[str, list[float]]:
    """Return the seconds of each turn of each contender, on the rank that took longest."""
    names = list(case.runs)
    own: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_turns):
        # Each round starts with another contender, so that none always goes first.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            result = case.consume(case.runs[name]())
            own[name].append(time.perf_counter() - start)
            del result
    ranks = _all_gather_object(own)
    return {name: list(map(max, *(times[name] for times in ranks))) for name in names}


def _memory(case: _Case, name: str) -> tuple[float, float]:
    """Return the peak on the destination and the highest one of the senders, in payloads."""
    # What the allocator kept of earlier calls would be used again, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    result = case.consume(case.runs[name]())
    peaks = _all_gather_object(_status_bytes("VmHWM") - before)
    del result
    destination = peaks.pop(case.dst)
    return destination / case.num_bytes / case.num_received, max(peaks) / case.num_bytes


def _status_bytes(key: str) -> int:
    """Return a field of this process's status, such as its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _import_times(num_turns: int) -> dict[str, list[float]]:
    """Return the seconds that each import takes in fresh interpreters."""
    modules = ["modelopt.torch.utils.distributed", "torch"]
    times: dict[str, list[float]] = {f"import {module}": [] for module in modules}
    for statement in list(times) * num_turns:
        code = f"import time; start = time.perf_counter(); {statement}\n"
        code += "print(time.perf_counter() - start)"
        times[statement].append(float(subprocess.check_output([sys.executable, "-c", code])))
    return times


def _rows(
    times: dict[str, list[float]], ranks: str, payload: str, memory: dict[str, tuple[float, float]]
) -> list[str]:
    """Return one row for each contender: ours, then its peers with their ratios."""
    ours, bare, *_ = times
    rows = []
    for name, own in times.items():
        cells = [f"**{name}**" if name == ours else name, ranks, payload]
        cells += [f"{1e3 * of(own):.3f}" for of in (median, min)]
        ratios = [f"{of(times[ours]) / of(own):.2f}" for of in (median, min)]
        cells += ["", ""] if name == ours else ratios
        over = ", ".join(f"{1e6 * (of(own) - of(times[bare])):.0f}" for of in (median, min))
        cells += ["" if name == bare else over]
        cells += [f"{part:.2f}" for part in memory[name]] if memory else ["", ""]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _size_text(num_bytes: int) -> str:
    """Return a size in words."""
    large = f"{num_bytes >> 20} MB" if num_bytes >> 20 else f"{num_bytes >> 10} KB"
    return large if num_bytes else "a plan"


def _report(folder: Path, rows: list[str]) -> None:
    """Print rows as they come, and keep them for the file."""
    print(*rows, sep="\n", flush=True)
    with (folder / "table.md").open("a") as table:
        print(*rows, sep="\n", file=table)


def main() -> None:
    """Measure on each number of ranks, print the table and write it where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run, of about a minute")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of each run")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file too")
    args = parser.parse_args()
    turns = _QUICK_TURNS if args.quick else _TURNS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _report(folder, [_HEADER])
        imports = _import_times(_QUICK_IMPORT_TURNS if args.quick else _IMPORT_TURNS)
        _report(folder, _rows(imports, "", "", {}))
        for num_ranks in args.ranks:
            spawn(_run_rank, (num_ranks, folder, turns), num_ranks)  # type: ignore[no-untyped-call]
        if args.output:
            args.output.write_text((folder / "table.md").read_text())


if __name__ == "__main__":
    main()
