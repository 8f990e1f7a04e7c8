# SPDX-License-Identifier: Apache-2.0
"""`broadcast_from` and `all_reduce`: decide together, fail together, stay in step."""

import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed
from _test_utils.torch.distributed.ranks import Outcome, bounded_outcome, launched, outcome_of
from _test_utils.torch.distributed.utils import DistributedWorkerPool, bounded_collectives

from modelopt.torch.utils.distributed import all_reduce, broadcast_from, distributed_run

Case = Callable[[int, int], Any]


def _outcomes(pool: DistributedWorkerPool, case: Case) -> tuple[Outcome, Outcome]:
    """Run `case` on both ranks, which must be in step after it; return their outcomes."""
    first, second = pool.run(bounded_outcome, case)
    return first, second


# One process


@pytest.mark.parametrize("is_group_up", [False, True])
def test_one_process_decides_alone(is_group_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()  # it would not pickle
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", None)
    if is_group_up:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert broadcast_from("lock", lambda: lock) is lock
        assert all_reduce("lock", lambda: lock, list) == [lock]
        with pytest.raises(SystemExit) as caught:
            broadcast_from("exit", lambda: sys.exit(4))
        assert caught.value.code == 4
    finally:
        if is_group_up:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rank", [-1, 1])
def test_one_process_still_checks_the_rank(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"'plan'.*from 0 to 0; got {rank}"):
        broadcast_from("plan", lambda: 1, rank=rank)


@pytest.mark.parametrize(
    "collective",
    [functools.partial(broadcast_from, rank=1), functools.partial(all_reduce, combine=min)],
)
def test_launch_whose_group_is_not_up_is_refused_before_fn_runs(
    monkeypatch: pytest.MonkeyPatch, collective: Callable[..., object]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls: list[int] = []
    with pytest.raises(RuntimeError, match=r"'batch size'.*distributed_run\(\)"):
        collective("batch size", lambda: calls.append(1))
    assert not calls


# Values


def _decide(rank: int, size: int) -> None:
    ran: list[int] = []

    def own() -> dict[str, Any]:
        ran.append(rank)
        return {"rank": rank, "weights": torch.full((3,), float(rank)), "nothing": None}

    for src in range(size):
        ran.clear()
        value = broadcast_from("own", own, rank=src)
        assert ran == ([rank] if rank == src else [])
        assert value["rank"] == src
        assert torch.equal(value["weights"], torch.full((3,), float(src)))
    made = object.__new__(threading.Event)  # the sender gets its own object back
    made.__dict__ = {"rank": 0}
    assert (broadcast_from("object", lambda: made) is made) == (rank == 0)
    assert all_reduce("rank", lambda: rank, list) == [0, 1]
    assert all_reduce("batch size", lambda: 8 - rank, min) == 7
    assert all_reduce("shared", lambda: made, list)[rank] is not made
    assert broadcast_from("none", lambda: None, rank=1) is None


def test_every_rank_gets_the_value(cpu_dist_workers: DistributedWorkerPool) -> None:
    first, second = _outcomes(cpu_dist_workers, _decide)
    assert (first.raised, second.raised) == (None, None), (first, second)


PLAIN: list[Any] = [None, True, 3, 2.5, "text", b"bytes", [1, (2, None)], {"nested": [2, 3]}]


class _Text(str):
    __slots__ = ()


def _nested(depth: int) -> list[Any]:
    return [_nested(depth - 1)] if depth else []


def _exchange_plain(rank: int, size: int) -> tuple[int, int]:
    """Exchange plain values, then others; return how often `torch.save` ran for each."""
    saved: list[Any] = []
    save = torch.save

    def spy(obj: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(obj)
        save(obj, *args, **kwargs)

    others: list[Any] = [
        _Text("a"),
        {1},
        [_Text("a")],
        {"a": 1j},
        list(range(1000)),
        _nested(8),
        range(3),
    ]
    with mock.patch.object(torch, "save", spy):
        for values in PLAIN, others:
            for value in values:
                assert broadcast_from("value", lambda: value if rank == 1 else None, 1) == value  # noqa: B023
                received = all_reduce("value", lambda: value, list)  # noqa: B023
                assert received == [value, value]
                assert [type(item) for item in received] == [type(value)] * 2
                if isinstance(value, (list, dict)):
                    assert received[rank] is not value
            saved.append("and then")
    plain = saved.index("and then")
    return plain, len(saved) - plain - 2


def test_plain_values_travel_as_they_are(cpu_dist_workers: DistributedWorkerPool) -> None:
    # Seven other values: each rank saves one for all_reduce, the sender one for broadcast_from too.
    assert cpu_dist_workers.run(_exchange_plain) == [(0, 7), (0, 14)]


def _bytes_sent(rank: int, size: int) -> int:
    sent: list[int] = []
    gather = torch.distributed.all_gather_object

    def spy(messages: list[Any], message: Any) -> None:
        sent.append(len(message[2]))
        gather(messages, message)

    with mock.patch.object(torch.distributed, "all_gather_object", spy):
        # As the bytes of a picture, within something that is not plain.
        all_reduce("bytes", lambda: {1: {bytes(range(256)) * 4000}}, list)
    return sent[0]


def test_bytes_within_a_value_travel_as_bytes(cpu_dist_workers: DistributedWorkerPool) -> None:
    assert max(cpu_dist_workers.run(_bytes_sent)) < 1.01 * 256 * 4000


def _rank_outside(rank: int, size: int) -> object:
    return broadcast_from("plan", lambda: 1, rank=2)


def test_rank_outside_the_run_is_refused(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _rank_outside):
        assert outcome.raised == "ValueError"
        assert "from 0 to 1; got 2" in outcome.text


class _CpuOnly:
    """Loads only with its tensors on the CPU, as a rank without the sender's GPU would need."""

    def __init__(self, device: str) -> None:
        self.device = device


def _map_location(rank: int, size: int) -> list[Any]:
    seen: list[Any] = []
    load = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("map_location"))
        return load(*args, **kwargs)

    with mock.patch.object(torch, "load", spy):
        broadcast_from("value", lambda: torch.ones(1))
        all_reduce("value", lambda: torch.ones(1), list)
    return seen


def test_tensors_load_onto_the_cpu(cpu_dist_workers: DistributedWorkerPool) -> None:
    # CPU ranks have no other device to load onto; tests/gpu shows it with a GPU tensor.
    sender, receiver = cpu_dist_workers.run(_map_location)
    assert sender == ["cpu"] * 2
    assert receiver == ["cpu"] * 3


def _calls(rank: int, size: int) -> list[tuple[Any, ...]]:
    """Return how torch's object collectives are called."""
    seen: list[tuple[Any, ...]] = []
    broadcast, gather = (
        torch.distributed.broadcast_object_list,
        torch.distributed.all_gather_object,
    )

    def spy_broadcast(objects: list[Any], **kwargs: Any) -> None:
        seen.append(("broadcast", kwargs))
        broadcast(objects, **kwargs)

    def spy_gather(objects: list[Any], obj: Any, **kwargs: Any) -> None:
        seen.append(("gather", kwargs))
        gather(objects, obj, **kwargs)

    with (
        mock.patch.object(torch.distributed, "broadcast_object_list", spy_broadcast),
        mock.patch.object(torch.distributed, "all_gather_object", spy_gather),
    ):
        broadcast_from("value", lambda: 1, rank=1)
        all_reduce("value", lambda: 1, list)
    return seen


def test_one_collective_each_is_looked_up_at_call_time(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    for calls in cpu_dist_workers.run(_calls):
        assert calls == [("broadcast", {"group_src": 1}), ("gather", {})]


# Labels


def _labels_of_broadcast(rank: int, size: int) -> object:
    return broadcast_from(f"label of {rank}", lambda: "value")


def test_broadcast_under_another_label_fails_on_the_receivers(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    sender, receiver = _outcomes(cpu_dist_workers, _labels_of_broadcast)
    assert sender == Outcome(None, "value")
    assert receiver.raised == "RuntimeError"
    assert "'label of 0'" in receiver.text
    assert "'label of 1'" in receiver.text


def _keys_in_another_order(rank: int, size: int) -> None:
    layers = {"q_proj": 1.0, "k_proj": 2.0}
    for key in layers if rank == 0 else reversed(layers):
        all_reduce(key, functools.partial(layers.__getitem__, key), max)


def test_all_reduce_over_keys_in_another_order_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    for outcome in _outcomes(cpu_dist_workers, _keys_in_another_order):
        assert outcome.raised == "RuntimeError"
        assert "rank 0 'q_proj', rank 1 'k_proj'" in outcome.text


def _error_under_another_label(rank: int, size: int) -> object:
    return broadcast_from(f"label of {rank}", functools.partial(_raise, ValueError("boom")))


def test_differing_labels_go_before_a_peers_failure(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    sender, receiver = _outcomes(cpu_dist_workers, _error_under_another_label)
    assert sender == Outcome("ValueError", "boom")
    assert "needs the same label" in receiver.text


# Failures


def _raise(error: BaseException) -> NoReturn:
    raise error


class _HoldsLockError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class _TwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise_local_class() -> NoReturn:
    class LocalError(Exception):
        pass

    raise LocalError("of a local class")


def _raise_chained() -> NoReturn:
    try:
        raise KeyError("inner")
    except KeyError as inner:
        raise ValueError("outer") from inner


def _raise_group() -> NoReturn:
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])  # noqa: F821


FAILURES: dict[str, tuple[Callable[[], NoReturn], str, str]] = {
    "plain": (lambda: _raise(ValueError("boom")), "ValueError", "boom"),
    "lock": (lambda: _raise(_HoldsLockError()), "_HoldsLockError", "holds a lock"),
    "two arguments": (
        lambda: _raise(_TwoArgumentsError("a", "b")),
        "_TwoArgumentsError",
        "a and b",
    ),
    "local class": (_raise_local_class, "LocalError", "of a local class"),
    "chained": (_raise_chained, "ValueError", "outer"),
    "unprintable": (lambda: _raise(_UnprintableError()), "_UnprintableError", ""),
    "memory": (lambda: _raise(MemoryError("too large")), "MemoryError", "too large"),
    "interrupt": (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt", ""),
    "generator exit": (lambda: _raise(GeneratorExit("gone")), "GeneratorExit", "gone"),
}
if sys.version_info >= (3, 11):
    FAILURES["group"] = (_raise_group, "ExceptionGroup", "several")


def _fail(name: str, failing: int, collective: str, rank: int, size: int) -> object:
    fail = FAILURES[name][0]
    if collective == "broadcast_from":
        return broadcast_from("decision", fail, rank=failing)
    return all_reduce("decision", fail if rank == failing else lambda: rank, list)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("collective", ["broadcast_from", "all_reduce"])
@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_one_rank_reaches_every_rank(
    cpu_dist_workers: DistributedWorkerPool, name: str, collective: str, failing: int
) -> None:
    _, error_type, text = FAILURES[name]
    outcomes = _outcomes(cpu_dist_workers, functools.partial(_fail, name, failing, collective))
    own, peer = outcomes[failing], outcomes[1 - failing]
    assert own.raised == error_type
    assert peer.raised == "RuntimeError"
    for part in (f"{collective}('decision')", f"rank {failing}", error_type, text):
        assert part in peer.text
    if name == "chained":
        assert own.cause == "KeyError"


def _fail_on_both(rank: int, size: int) -> object:
    return all_reduce("decision", lambda: _raise(ValueError(f"of rank {rank}")), list)


def test_rank_with_an_error_of_its_own_raises_it(cpu_dist_workers: DistributedWorkerPool) -> None:
    first, second = _outcomes(cpu_dist_workers, _fail_on_both)
    assert first == Outcome("ValueError", "of rank 0")
    assert second == Outcome("ValueError", "of rank 1")


def _return_what_does_not_serialise(
    name: str, failing: int, collective: str, rank: int, size: int
) -> object:
    value = {"lock": threading.Lock(), "lambda": lambda: 0, "generator": (i for i in "ab")}[name]
    if collective == "broadcast_from":
        return broadcast_from("decision", lambda: value, rank=failing)
    return all_reduce("decision", lambda: value if rank == failing else rank, list)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("collective", ["broadcast_from", "all_reduce"])
@pytest.mark.parametrize("name", ["lock", "lambda", "generator"])
def test_value_that_does_not_serialise_fails_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool, name: str, collective: str, failing: int
) -> None:
    case = functools.partial(_return_what_does_not_serialise, name, failing, collective)
    outcomes = _outcomes(cpu_dist_workers, case)
    own, peer = outcomes[failing], outcomes[1 - failing]
    assert own.raised == "TypeError"
    assert own.cause
    assert f"on rank {failing}" in own.text
    assert peer.raised == "RuntimeError"
    for part in ("'decision'", f"failed on rank {failing}", "needs a value that serialises"):
        assert part in peer.text


class _SerialisesOnce:
    """Pickles the first time only: what is checked must be what is sent."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.times += 1
        if self.times > 1:
            raise pickle.PicklingError("pickled twice")
        return _SerialisesOnce, ()


def _serialise_once(rank: int, size: int) -> None:
    broadcast_from("once", _SerialisesOnce)
    assert len(all_reduce("once", _SerialisesOnce, list)) == 2


def test_value_is_serialised_once(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _serialise_once):
        assert outcome.raised is None, outcome


# Exits


class _UnprintableCode:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _exit(code: object, failing: int, collective: str, rank: int, size: int) -> object:
    if collective == "broadcast_from":
        return broadcast_from("stop", lambda: sys.exit(code), rank=failing)  # type: ignore[arg-type]
    return all_reduce("stop", lambda: sys.exit(code) if rank == failing else rank, list)  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("collective", ["broadcast_from", "all_reduce"])
@pytest.mark.parametrize(
    ("code", "received"),
    [(0, 0), (3, 3), (None, None), ("text", "text"), ([], "[]"), (2.5, "2.5"), (True, 1)],
)
def test_exit_of_one_rank_is_an_exit_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool,
    code: object,
    received: object,
    collective: str,
    failing: int,
) -> None:
    outcomes = _outcomes(cpu_dist_workers, functools.partial(_exit, code, failing, collective))
    assert outcomes[failing] == Outcome("SystemExit", code)
    assert outcomes[1 - failing] == Outcome("SystemExit", received)
    assert type(outcomes[1 - failing].value) is type(received)


def _exit_unprintably(rank: int, size: int) -> object:
    with pytest.raises(SystemExit) as caught:
        broadcast_from("stop", lambda: sys.exit(_UnprintableCode()))  # type: ignore[arg-type]
    return str(caught.value.code) if rank == 1 else None


def test_exit_code_that_does_not_print_still_ends_every_rank(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    _, receiver = _outcomes(cpu_dist_workers, _exit_unprintably)
    assert "_UnprintableCode" in receiver.value


def _exit_with_own_code(rank: int, size: int) -> object:
    return all_reduce("stop", lambda: sys.exit(rank + 5), list)


def test_every_exiting_rank_keeps_its_own_code(cpu_dist_workers: DistributedWorkerPool) -> None:
    first, second = _outcomes(cpu_dist_workers, _exit_with_own_code)
    assert (first, second) == (Outcome("SystemExit", 5), Outcome("SystemExit", 6))


def _exit_beside_an_error(exiting: int, rank: int, size: int) -> object:
    error = ValueError("boom")
    return all_reduce("mixed", lambda: sys.exit(0) if rank == exiting else _raise(error), list)


@pytest.mark.parametrize("exiting", [0, 1])
def test_exit_beside_an_error_is_an_error(
    cpu_dist_workers: DistributedWorkerPool, exiting: int
) -> None:
    outcomes = _outcomes(cpu_dist_workers, functools.partial(_exit_beside_an_error, exiting))
    assert outcomes[1 - exiting] == Outcome("ValueError", "boom")
    exited = outcomes[exiting]
    assert (exited.raised, exited.cause) == ("RuntimeError", "SystemExit")
    assert f"failed on rank {1 - exiting}: ValueError: boom" in exited.text


def _exit_under_another_label(rank: int, size: int) -> object:
    return all_reduce(f"label of {rank}", lambda: sys.exit(0), list)


def test_exit_under_another_label_is_an_error(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _exit_under_another_label):
        assert outcome.raised == "RuntimeError"
        assert "'label of 0'" in outcome.text


# What does not load


class _DoesNotLoad:
    """Pickles, but does not load anywhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, (ValueError("refuses to load"),)


def _send_what_does_not_load(collective: str, rank: int, size: int) -> object:
    if collective == "broadcast_from":
        return type(broadcast_from("value", _DoesNotLoad, rank=1)).__name__
    return all_reduce("value", lambda: _DoesNotLoad() if rank == 1 else 0, list)


@pytest.mark.parametrize("collective", ["broadcast_from", "all_reduce"])
def test_value_that_does_not_load_fails_where_it_is_loaded(
    cpu_dist_workers: DistributedWorkerPool, collective: str
) -> None:
    case = functools.partial(_send_what_does_not_load, collective)
    receiver, sender = _outcomes(cpu_dist_workers, case)
    failing = [receiver] if collective == "broadcast_from" else [receiver, sender]
    for outcome in failing:
        assert outcome.raised == "RuntimeError"
        for part in ("'value'", "of rank 1 does not load", "ValueError: refuses to load"):
            assert part in outcome.text
    assert collective == "all_reduce" or sender.raised is None


def _load_weights_only(rank: int, size: int) -> object:
    if rank == 1:
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        return type(broadcast_from("value", lambda: _CpuOnly("cpu"))).__name__
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)


def test_environment_that_forbids_loading_fails_there(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    sender, receiver = _outcomes(cpu_dist_workers, _load_weights_only)
    assert sender == Outcome(None, "_CpuOnly")
    assert receiver.raised == "RuntimeError"
    assert "value of rank 0 does not load on rank 1" in receiver.text


def _combine_fails(rank: int, size: int) -> object:
    return all_reduce("ratio", lambda: 0, lambda values: 1 / sum(values))


def test_combine_fails_alike_on_every_rank(cpu_dist_workers: DistributedWorkerPool) -> None:
    for outcome in _outcomes(cpu_dist_workers, _combine_fails):
        assert outcome.raised == "ZeroDivisionError"


# A collective that breaks


def _stay_away(collective: str, fails_itself: str, rank: int, size: int) -> Outcome | None:
    def own() -> int:
        if fails_itself:
            raise SystemExit(0) if fails_itself == "exit" else ValueError("boom")
        return 1

    with bounded_collectives(timedelta(seconds=1)):
        torch.distributed.barrier()  # connected
        if rank == 0:
            time.sleep(2)  # away, but alive: the peer must time out by itself
            return None
        if collective == "broadcast_from":
            return outcome_of(lambda: broadcast_from("away", own))
        return outcome_of(lambda: all_reduce("away", own, list))


@pytest.mark.parametrize("collective", ["broadcast_from", "all_reduce"])
def test_peer_that_stays_away_is_a_labelled_error(
    cpu_dist_workers: DistributedWorkerPool, collective: str
) -> None:
    _, waiting = cpu_dist_workers.run(functools.partial(_stay_away, collective, ""))
    assert waiting.raised == "RuntimeError"
    assert waiting.cause
    assert waiting.cause in waiting.text
    assert f"{collective}('away') broke on rank 1 of 2" in waiting.text
    # The pool's group meets over a file, where a note for each call would cost.
    assert "last seen elsewhere" not in waiting.text


@pytest.mark.parametrize(("own", "expected"), [("exit", "RuntimeError"), ("error", "ValueError")])
def test_own_error_goes_before_a_broken_collective_and_that_before_an_exit(
    cpu_dist_workers: DistributedWorkerPool, own: str, expected: str
) -> None:
    _, failing = cpu_dist_workers.run(functools.partial(_stay_away, "all_reduce", own))
    assert failing.raised == expected


def _meet_a_bare_collective(rank: int, size: int) -> Outcome | None:
    with bounded_collectives(timedelta(seconds=2)):
        if rank == 0:
            torch.distributed.broadcast_object_list(["bare"], src=0)
            return None
        return outcome_of(lambda: broadcast_from("value", lambda: 1))


def test_message_of_somebody_else_is_a_labelled_error(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    _, receiver = cpu_dist_workers.run(_meet_a_bare_collective)
    assert receiver.raised == "RuntimeError"
    assert "broadcast_from('value') broke on rank 1" in receiver.text


def _sleep_past_the_timeout(rank: int, size: int, port: int) -> tuple[Outcome, float]:
    def sleep() -> str:
        time.sleep(6)
        return "late"

    def body() -> str:
        with distributed_run(timedelta(seconds=2), "cpu", backend="gloo"):
            return broadcast_from("slow", sleep)

    no_abort = mock.patch("modelopt.torch.utils.distributed.abort")
    with launched(rank, size, port), no_abort:
        start = time.monotonic()
        return outcome_of(body), time.monotonic() - start


def test_receiver_waits_for_the_timeout_of_the_run(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int
) -> None:
    _, (receiver, seconds) = cpu_dist_workers.run(_sleep_past_the_timeout, launch_port)
    assert receiver.raised == "RuntimeError"
    assert "broadcast_from('slow') broke on rank 1 of 2" in receiver.text
    assert 1.5 < seconds < 5


# Where the others are


def _wait_for_one_elsewhere(case: str, rank: int, size: int, port: int) -> Outcome | None:
    def body() -> None:
        with distributed_run(timedelta(seconds=2), "cpu", backend="gloo"):
            if case != "nowhere":
                for label in ("first", "second"):
                    all_reduce(label, lambda: rank, list)
            if rank == 0 and case == "elsewhere":
                broadcast_from("plan", lambda: 1)
            if rank == 0:
                time.sleep(3.5)
            all_reduce("second", lambda: rank, list)

    no_abort = mock.patch("modelopt.torch.utils.distributed.abort")
    with launched(rank, size, port), no_abort:
        return outcome_of(body)


@pytest.mark.parametrize(
    ("case", "call", "seen"),
    [
        pytest.param("nowhere", 1, "rank 0 nowhere", marks=pytest.mark.slow),
        ("behind", 3, "rank 0 at all_reduce('second'), call 2"),
        ("elsewhere", 3, "rank 0 at broadcast_from('plan'), call 3"),
    ],
)
def test_waiting_rank_says_where_the_others_were_last_seen(
    cpu_dist_workers: DistributedWorkerPool, launch_port: int, case: str, call: int, seen: str
) -> None:
    waits = functools.partial(_wait_for_one_elsewhere, case)
    _, waiting = cpu_dist_workers.run(waits, launch_port)
    assert f"This is call {call}; last seen elsewhere: {seen}. A peer" in waiting.text


STORE = """
import time
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def _lose_the_store(number: int, rank: int, size: int, port: int, host: int) -> tuple[Any, ...]:
    def body() -> None:
        with distributed_run(timedelta(seconds=2), "cpu", backend="gloo"):
            all_reduce("before", lambda: rank, list)
            if rank == 0:
                os.kill(host, number)
            torch.distributed.barrier()
            start = time.monotonic()
            for _ in range(50):
                assert all_reduce("after", lambda: rank, list) == [0, 1]
            seconds.append(time.monotonic() - start)
            if rank == 1:
                all_reduce("alone", lambda: 1, list)
            time.sleep(3.5)

    seconds: list[float] = []
    start = time.monotonic()
    with launched(rank, size, port), mock.patch("modelopt.torch.utils.distributed.abort"):
        outcome = outcome_of(body)
    return outcome, seconds, time.monotonic() - start


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_store_that_is_gone_or_silent_holds_no_collective_up(
    cpu_dist_workers: DistributedWorkerPool, number: int
) -> None:
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout
        port = int(host.stdout.readline())
        job = functools.partial(_lose_the_store, number)
        _, (waiting, [seconds], total) = cpu_dist_workers.run(job, port, host.pid)
        host.kill()
    assert waiting.raised == "RuntimeError"
    assert "all_reduce('alone') broke on rank 1 of 2" in waiting.text
    assert "elsewhere" not in waiting.text
    assert seconds < 5
    assert total < 20
