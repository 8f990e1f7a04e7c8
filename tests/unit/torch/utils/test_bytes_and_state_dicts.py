# SPDX-License-Identifier: Apache-2.0
"""Bytes, tensors and state dicts between ranks, and the older object helpers."""

import array
import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from _test_utils.torch.distributed.ranks import Outcome, bounded_outcome, outcome_of
from _test_utils.torch.distributed.utils import DistributedWorkerPool

import modelopt.torch.utils.distributed as mdist
from modelopt.torch.utils.distributed import (
    allgather,
    allreduce,
    broadcast,
    broadcast_state_dict,
    gather_bytes,
    gather_state_dicts,
    master_only,
)

MIB = 2**20
Case = Callable[[int, int], Any]


def _outcomes(pool: DistributedWorkerPool, case: Case) -> list[Outcome]:
    """Run `case` on both ranks, which must be in step after it; return their outcomes."""
    return pool.run(bounded_outcome, case)


def _pattern(length: int, seed: int) -> bytes:
    return bytes((index * 7 + seed) % 251 for index in range(length))


# gather_bytes


def _gather_of_lengths(lengths: list[int], dst: int, chunk_bytes: int, rank: int, size: int) -> Any:
    data = _pattern(lengths[rank], rank)
    return gather_bytes(data, dst, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("dst", [0, 1])
@pytest.mark.parametrize("lengths", [[0, 0], [0, 1], [15, 16], [17, 16], [0, 33], [48, 5]])
def test_gather_bytes_takes_any_length_in_chunks(
    cpu_dist_workers: DistributedWorkerPool, lengths: list[int], dst: int
) -> None:
    case = functools.partial(_gather_of_lengths, lengths, dst, 16)
    outcomes = _outcomes(cpu_dist_workers, case)
    expected = [bytearray(_pattern(length, rank)) for rank, length in enumerate(lengths)]
    assert outcomes[dst] == Outcome(None, expected)
    assert all(type(item) is bytearray for item in outcomes[dst].value)
    assert outcomes[1 - dst] == Outcome(None, None)


def _gather_kinds(rank: int, size: int) -> None:
    kinds: list[Any] = [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"xabcdx")[1:5],
        array.array("H", [1, 2]),
        torch.arange(4, dtype=torch.uint8).numpy(),
    ]
    for data in kinds:
        gathered = gather_bytes(data, 0)
        if rank == 0:
            assert gathered == [bytearray(data)] * 2
            gathered[0].extend(b"more")  # the memory is the caller's alone
        assert bytes(data) == bytes(memoryview(data).cast("B"))


def test_gather_bytes_takes_what_is_bytes_like(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _gather_kinds):
        assert outcome.raised is None, outcome


def _most_in_flight(rank: int, size: int) -> tuple[int, int]:
    """Return the largest chunk that moves, and how many are received before the first wait."""
    sizes: list[int] = []
    send, irecv = torch.distributed.send, torch.distributed.irecv

    def spy_send(tensor: torch.Tensor, **kwargs: Any) -> None:
        sizes.append(tensor.numel())
        send(tensor, **kwargs)

    def spy_irecv(tensor: torch.Tensor, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return irecv(tensor, **kwargs)

    with (
        mock.patch.object(torch.distributed, "send", spy_send),
        mock.patch.object(torch.distributed, "irecv", spy_irecv),
    ):
        gather_bytes(bytes(100), 0, chunk_bytes=32)
    return max(sizes), len(sizes)


def test_gather_bytes_moves_at_most_chunk_bytes_at_a_time(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    assert cpu_dist_workers.run(_most_in_flight) == [(32, 4), (32, 4)]


def _resident_mib(peak: bool = False) -> float:
    """Return this process's resident memory, or its highest since it was last reset."""
    status = Path("/proc/self/status").read_text()
    line = next(
        line for line in status.splitlines() if line.startswith("VmHWM" if peak else "VmRSS")
    )
    return int(line.split()[1]) / 1024


def _memory_of(lengths: list[int], rank: int, size: int) -> tuple[float, bool]:
    """Return how many MiB a gather to rank 0 takes at its height."""
    gather_bytes(b"", 0)  # connects the ranks
    data = bytearray(os.urandom(1)) * lengths[rank]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_mib()
    gathered = gather_bytes(data, 0)
    return _resident_mib(peak=True) - before, gathered is None


@pytest.mark.parametrize("lengths", [[64 * MIB, 64 * MIB], [1024, 200 * MIB]])
def test_gather_bytes_copies_nothing_on_a_sender_and_once_on_dst(
    cpu_dist_workers: DistributedWorkerPool, lengths: list[int]
) -> None:
    (received, _), (sent, is_none) = cpu_dist_workers.run(functools.partial(_memory_of, lengths))
    assert received < 1.15 * sum(lengths) / MIB
    assert sent < 0.15 * lengths[1] / MIB
    assert is_none


def _wrong(argument: str, wrong_rank: int | None, rank: int, size: int) -> Any:
    arguments: dict[str, Any] = {"data": b"abc", "dst": 0, "chunk_bytes": 16}
    wrong: dict[str, tuple[str, Any]] = {
        "str": ("data", "abc"),
        "tensor": ("data", torch.ones(2)),
        "none": ("data", None),
        "strided": ("data", memoryview(b"abcdef")[::2]),
        "dst": ("dst", 1),
        "dst outside": ("dst", 2),
        "dst negative": ("dst", -1),
        "dst text": ("dst", "0"),
        "dst huge": ("dst", 2**70),
        "chunk": ("chunk_bytes", 17),
        "chunk 0": ("chunk_bytes", 0),
        "chunk None": ("chunk_bytes", None),
    }
    if wrong_rank in (None, rank):
        name, value = wrong[argument]
        arguments[name] = value
    return gather_bytes(**arguments)


@pytest.mark.parametrize("wrong_rank", [0, 1])
@pytest.mark.parametrize("argument", ["str", "tensor", "none", "strided"])
def test_gather_bytes_without_bytes_on_one_rank_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, argument: str, wrong_rank: int
) -> None:
    outcomes = _outcomes(cpu_dist_workers, functools.partial(_wrong, argument, wrong_rank))
    assert outcomes[wrong_rank].raised == "TypeError"
    assert outcomes[1 - wrong_rank].raised == "RuntimeError"
    for outcome in outcomes:
        assert f"rank {wrong_rank} passed" in outcome.text
    if argument == "str":
        assert all("passed str. Encode it first." in outcome.text for outcome in outcomes)


@pytest.mark.parametrize("wrong_rank", [0, 1])
@pytest.mark.parametrize(
    "argument", ["dst", "dst outside", "dst negative", "dst text", "dst huge", "chunk", "chunk 0"]
)
def test_gather_bytes_that_ranks_disagree_on_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, argument: str, wrong_rank: int
) -> None:
    outcomes = _outcomes(cpu_dist_workers, functools.partial(_wrong, argument, wrong_rank))
    is_unsendable = argument in ("dst text", "dst huge")
    for rank, outcome in enumerate(outcomes):
        expected = "TypeError" if is_unsendable and rank == wrong_rank else "RuntimeError"
        assert outcome.raised == expected, outcome
        assert f"rank {wrong_rank}" in outcome.text


@pytest.mark.parametrize("argument", ["dst outside", "dst negative", "chunk 0"])
def test_gather_bytes_refuses_what_cannot_be_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, argument: str
) -> None:
    for outcome in _outcomes(cpu_dist_workers, functools.partial(_wrong, argument, None)):
        assert outcome.raised == "ValueError"


def _subgroups(rank: int, size: int) -> None:
    alone, swapped = mdist.get_group([1]), mdist.get_group([0, 1])
    if rank == 1:
        # Without rank 0: dst is a global rank, the answer in group-rank order.
        assert gather_bytes(b"mine", 1, alone) == [bytearray(b"mine")]
        with pytest.raises(ValueError, match=r"ranks are \[1\]; got 0"):
            gather_bytes(b"mine", 0, alone)
        assert [state["x"] for state in gather_state_dicts({"x": 1}, 1, alone)] == [1]
        assert allgather(5, alone) == [5]
        assert broadcast(5, 1, alone) == 5
        assert broadcast_state_dict({"x": torch.ones(1)}, 1, "cpu", alone)["x"] == 1
    else:
        with pytest.raises(ValueError, match="ranks of its group only; rank 0 is none"):
            gather_bytes(b"mine", 1, alone)
    gathered = gather_bytes(bytes([rank]), 1, swapped)
    assert gathered == ([bytearray(b"\0"), bytearray(b"\1")] if rank == 1 else None)


def test_groups_are_named_by_global_ranks(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_subgroups)


@pytest.fixture(scope="module")
def three_workers() -> Iterator[DistributedWorkerPool]:
    """Three ranks: a group of the last two, whose group ranks are not their global ones."""
    pool = DistributedWorkerPool(3, backend="gloo")
    yield pool
    pool.shutdown()


def _last_two(rank: int, size: int) -> None:
    group = mdist.get_group([1, 2])
    if rank == 0:
        return
    for dst in (1, 2):
        gathered = gather_bytes(bytes([rank]), dst, group)
        assert gathered == ([bytearray(b"\1"), bytearray(b"\2")] if rank == dst else None)
        states = list(gather_state_dicts({"rank": rank}, dst, group))
        assert states == ([{"rank": 1}, {"rank": 2}] if rank == dst else [])
        assert broadcast(rank, dst, group) == dst
        state = broadcast_state_dict(
            {"x": torch.tensor(rank)} if rank == dst else None, dst, "cpu", group
        )
        assert state["x"] == dst
    assert allgather(rank, group) == [1, 2]
    iterator = gather_state_dicts({"x": slice(rank) if rank == 2 else 1}, 1, group)
    outcome = outcome_of(lambda: list(iterator))
    assert rank == 2 or "what rank 2 sent does not load on rank 1" in outcome.text


def test_ranks_of_a_group_are_global(three_workers: DistributedWorkerPool) -> None:
    three_workers.run(_last_two)


def _rank_died(rank: int, size: int) -> Outcome | None:
    if rank == 0:
        gather_bytes(b"", 0)
        torch.distributed.destroy_process_group()
        return None
    gather_bytes(b"", 0)
    return outcome_of(lambda: gather_bytes(b"abc", 0))


def test_peer_that_is_gone_is_a_named_error(cpu_dist_workers: DistributedWorkerPool) -> None:
    _, outcome = cpu_dist_workers.run(_rank_died)
    assert outcome.raised == "RuntimeError"
    assert "gather_bytes broke on rank 1 of 2" in outcome.text
    assert outcome.cause


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:0"),
        ("cpu:gloo", "cuda:0", "cpu"),
        ("cuda:nccl", "cpu", "cuda:3"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
    ],
)
def test_device_memory_is_used_only_without_a_cpu_backend(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert mdist._transport_device(config, torch.device(device)) == torch.device(expected)


def _staged(rank: int, size: int) -> list[int]:
    """Gather and broadcast as on a group without a CPU backend, "meta" standing in for its device.

    Returns the bytes of each tensor that is staged.
    """
    staged: list[int] = []

    def transported(tensor: torch.Tensor, group: Any, is_filled: bool = True) -> torch.Tensor:
        staged.append(tensor.numel())
        return tensor.clone() if is_filled else torch.empty_like(tensor)

    with mock.patch.object(mdist, "_transported", transported):
        gathered = gather_bytes(_pattern(100, rank), 0, chunk_bytes=32)
        expected = [bytearray(_pattern(100, 0)), bytearray(_pattern(100, 1))]
        assert gathered == (expected if rank == 0 else None)
        assert broadcast("value" if rank == 1 else None, 1) == "value"
        state = broadcast_state_dict({"x": torch.ones(3)} if rank == 0 else None, 0, "cpu")
        assert torch.equal(state["x"], torch.ones(3))
    return staged


def test_staged_chunks_arrive_where_they_belong(cpu_dist_workers: DistributedWorkerPool) -> None:
    receiver, sender = cpu_dist_workers.run(_staged)
    # A header, then chunks.
    assert receiver[:5] == sender[:5] == [512, 32, 32, 32, 4]


# State dicts


def _tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "uint16": torch.arange(5).to(torch.uint16),
        "complex64": torch.complex(base, -base),
        "bool": base > 3,
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "strided": base.t()[1:4:2],
        "shared": base,
        "view": base[1:],
    }


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    same = first.dtype == second.dtype and first.shape == second.shape
    return same and first.contiguous().view(-1).tolist() == second.contiguous().view(-1).tolist()


def _gather_tensors(rank: int, size: int) -> None:
    state: dict[str, Any] = {**_tensors(), "rank": rank, "nested": {"list": [1, "two", None]}}
    states = list(gather_state_dicts(state, 0))
    assert len(states) == (size if rank == 0 else 0)
    for src, loaded in enumerate(states):
        assert (loaded["rank"], loaded["nested"]) == (src, {"list": [1, "two", None]})
        for name, tensor in _tensors().items():
            assert _is_equal(loaded[name], tensor), name
            assert loaded[name].device.type == "cpu"
        assert loaded["strided"].stride() == state["strided"].stride()
        shared = loaded["shared"].untyped_storage().data_ptr()
        assert loaded["view"].untyped_storage().data_ptr() == shared


def test_gather_state_dicts_is_bit_equal(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _gather_tensors):
        assert outcome.raised is None, outcome


def _gather_without_iterating(rank: int, size: int) -> bool:
    iterator = gather_state_dicts({"x": torch.ones(2)}, 1)
    return hasattr(iterator, "__next__")


def test_gather_state_dicts_communicates_in_the_call(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    for outcome in _outcomes(cpu_dist_workers, _gather_without_iterating):
        assert outcome == Outcome(None, True)


def _gather_state_memory(rank: int, size: int) -> float:
    """Return the height of memory on this rank, in payloads of all ranks."""
    state = {"x": torch.ones(64 * MIB, dtype=torch.uint8)}
    for _ in gather_state_dicts({}, 0):
        pass
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_mib()
    # What is loaded is kept, so that what was received must have gone.
    states = list(gather_state_dicts(state, 0))
    assert all(loaded["x"][-1] == 1 for loaded in states)
    return (_resident_mib(peak=True) - before) / (64 * size)


def test_gather_state_dicts_frees_each_payload_once_loaded(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    destination, sender = cpu_dist_workers.run(_gather_state_memory)
    assert destination < 1.7
    assert sender < 0.7


def _gather_what_does_not_serialise(wrong_rank: int, rank: int, size: int) -> Any:
    state = {"x": (i for i in "ab") if rank == wrong_rank else 1}
    return list(gather_state_dicts(state, 0))


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_state_that_does_not_serialise_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, wrong_rank: int
) -> None:
    case = functools.partial(_gather_what_does_not_serialise, wrong_rank)
    outcomes = _outcomes(cpu_dist_workers, case)
    assert outcomes[wrong_rank].raised == "TypeError"
    assert outcomes[1 - wrong_rank].raised == "RuntimeError"
    assert all(f"rank {wrong_rank}" in outcome.text for outcome in outcomes)


class _Hostile:
    """A pickle that would make a folder, for whoever loads it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def _send_hostile(function: str, folder: str, rank: int, size: int) -> Any:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    payload = {"x": _Hostile(folder)} if rank == 1 else {"x": 1}
    if function == "gather_state_dicts":
        return len(list(gather_state_dicts(payload, 0)))
    if function == "broadcast":
        return type(broadcast(payload, src=1)).__name__
    if function == "allgather":
        return len(allgather(payload))
    return type(allreduce(payload)).__name__


@pytest.mark.parametrize("function", ["gather_state_dicts", "broadcast", "allgather", "allreduce"])
def test_hostile_payload_runs_nothing_and_names_its_rank(
    cpu_dist_workers: DistributedWorkerPool, function: str, tmp_path: Path
) -> None:
    folder = tmp_path / "made by the payload"
    receiver, _ = _outcomes(
        cpu_dist_workers, functools.partial(_send_hostile, function, str(folder))
    )
    assert receiver.raised == "RuntimeError"
    assert "what rank 1 sent does not load on rank 0" in receiver.text
    assert "add_safe_globals" in receiver.text
    assert not folder.exists()


def _hostile_of_one(folder: str) -> Any:
    return list(gather_state_dicts({"x": _Hostile(folder)}, 0))


def _allgather_what_the_first_rank_cannot_give(rank: int, size: int) -> Outcome:
    return bounded_outcome(rank, size, lambda *_: allgather(slice(0) if rank == 0 else rank))


def test_object_that_does_not_load_leaves_the_ranks_in_step(
    three_workers: DistributedWorkerPool,
) -> None:
    first, *others = three_workers.run(_allgather_what_the_first_rank_cannot_give)
    assert (first.raised, first.value[1:]) == (None, [1, 2])
    for outcome in others:
        assert outcome.raised == "RuntimeError"
        assert "what rank 0 sent does not load" in outcome.text


def test_one_process_loads_its_own_state_the_same_way(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    [loaded] = gather_state_dicts(state, 0)
    assert torch.equal(loaded["x"], state["x"])
    assert loaded["x"] is not state["x"]
    with pytest.raises(RuntimeError, match="what rank 0 sent does not load"):
        _hostile_of_one(str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


def _broadcast_state(src: int, rank: int, size: int) -> None:
    state = _tensors() if rank == src else None
    received = broadcast_state_dict(state, src, "cpu")
    assert list(received) == list(_tensors())
    for name, tensor in _tensors().items():
        assert _is_equal(received[name], tensor), name
    # Each rank names its own device; "meta" stands in for a GPU.
    device = "cpu" if rank == src else "meta"
    placed = broadcast_state_dict(state, src, device)
    assert all(tensor.device.type == device for tensor in placed.values())


@pytest.mark.parametrize("src", [0, 1])
def test_broadcast_state_dict_gives_every_rank_the_tensors(
    cpu_dist_workers: DistributedWorkerPool, src: int
) -> None:
    for outcome in _outcomes(cpu_dist_workers, functools.partial(_broadcast_state, src)):
        assert outcome.raised is None, outcome


def _broadcast_wrong_state(kind: str, rank: int, size: int) -> Any:
    wrong = {
        "none": None,
        "number": {"x": 1},
        "sparse": {"x": torch.ones(2).to_sparse()},
        "meta": {"x": torch.ones(2, device="meta")},
    }
    return broadcast_state_dict(wrong[kind] if rank == 1 else None, 1, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["none", "number", "sparse", "meta"])
def test_state_that_cannot_be_sent_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, kind: str
) -> None:
    receiver, sender = _outcomes(cpu_dist_workers, functools.partial(_broadcast_wrong_state, kind))
    assert sender.raised == "TypeError"
    assert receiver.raised == "RuntimeError"
    assert "broadcast_state_dict failed on rank 1" in receiver.text


# The older object helpers


def _older_helpers(rank: int, size: int) -> None:
    mine: dict[str, Any] = {"rank": rank, "x": torch.full((2,), float(rank))}
    for src in range(size):
        value = broadcast(mine, src)
        assert (value is mine) == (rank == src)
        assert (value["rank"], value["x"].tolist()) == (src, [src, src])
    gathered = allgather(mine)
    assert [item["rank"] for item in gathered] == [0, 1]
    assert gathered[rank] is mine
    assert allreduce(rank + 1) == 3
    assert torch.equal(allreduce(torch.full((2,), rank + 1.0)), torch.full((2,), 3.0))
    with pytest.raises(NotImplementedError, match="'max'"):
        allreduce(1, "max")
    ran: list[int] = []

    @master_only
    def decide(offset: int, *, factor: int) -> int:
        """Decide."""
        ran.append(rank)
        return (rank + offset) * factor

    assert decide(3, factor=2) == 6
    assert ran == ([0] if rank == 0 else [])
    assert (decide.__name__, decide.__doc__) == ("decide", "Decide.")


def test_older_helpers_work_on_a_cpu_group(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _older_helpers):
        assert outcome.raised is None, outcome


def test_one_process_has_itself_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    value = object()  # it is not serialised
    assert broadcast(value) is value
    assert allgather(value) == [value]
    assert allreduce(3) == 3
    assert master_only(lambda: value)() is value
    state = broadcast_state_dict({"x": torch.ones(2)}, 0, "meta")
    assert state["x"].is_meta
    assert gather_bytes(b"abc", 0) == [bytearray(b"abc")]
    for call in (lambda: broadcast(1, src=1), lambda: gather_bytes(b"", 1)):
        with pytest.raises(ValueError, match=r"ranks are \[0\]; got 1"):
            call()
    with pytest.raises(TypeError, match="rank 0 passed str"):
        gather_bytes("abc", 0)  # type: ignore[arg-type]


def _object_that_does_not_serialise(function: str, rank: int, size: int) -> Any:
    value = (i for i in "ab") if rank == 1 else 1
    return broadcast(value, 1) if function == "broadcast" else allgather(value)


@pytest.mark.parametrize("function", ["broadcast", "allgather"])
def test_object_that_does_not_serialise_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, function: str
) -> None:
    case = functools.partial(_object_that_does_not_serialise, function)
    receiver, sender = _outcomes(cpu_dist_workers, case)
    assert sender.raised
    assert receiver.raised == "RuntimeError"
    assert f"{function} failed on rank 1" in receiver.text


def _other_sources(rank: int, size: int) -> Any:
    return broadcast(1, src=rank)


def test_broadcast_from_different_sources_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    for outcome in _outcomes(cpu_dist_workers, _other_sources):
        assert outcome.raised == "RuntimeError"
        assert "rank 0 src=0" in outcome.text
        assert "rank 1 src=1" in outcome.text


def _no_pickle(rank: int, size: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object collective")

    with (
        mock.patch.object(torch.distributed, "broadcast_object_list", refuse),
        mock.patch.object(torch.distributed, "all_gather_object", refuse),
        mock.patch.object(torch.distributed, "gather_object", refuse),
    ):
        gather_bytes(b"abc", 0)
        list(gather_state_dicts({"x": 1}, 0))
        broadcast(1)
        allgather(1)


def test_no_object_collective_unpickles_what_a_peer_sends(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_no_pickle)


def _long_error(rank: int, size: int) -> Any:
    def fail() -> memoryview:
        raise ValueError("é" * 1000)

    own = mdist._parcel(fail) if rank == 1 else mdist._NOTHING
    return mdist._meet("exchange", own, None, "src", 0)


def test_long_error_of_a_peer_is_cut_to_its_header(cpu_dist_workers: DistributedWorkerPool) -> None:
    receiver, sender = _outcomes(cpu_dist_workers, _long_error)
    assert sender.raised == "ValueError"
    assert "exchange failed on rank 1: ValueError: ééé" in receiver.text
