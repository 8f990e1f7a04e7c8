# SPDX-License-Identifier: Apache-2.0
"""Runs as their users start them, in which a rank fails: by torchrun, and as bare processes."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from faults.matrix import (
    CASES,
    ERRORS,
    LAUNCHER_KILL_SECONDS,
    SHORT_SECONDS,
    SIGNALS,
    Case,
    Ending,
    launch,
    start,
    watch,
)

OVER_SECONDS = 10.0
# One of each kind; the rest shows the same in more places.
QUICK = {
    "raise-body-1of2",
    "raise-broadcast-1of2",
    "interrupt-body-1of2",
    "SIGKILL-all_reduce-1of2",
    "memory-gather_bytes-0of2",
    "raise-forward_loop-1of2",
    "raise-body-1of2-bare",
    "SIGKILL-all_reduce-0of2-bare",
}
assert {str(case) for case in CASES} >= QUICK


def _allowed_seconds(case: Case) -> float:
    """Return how long after the fault the last process may go."""
    if not case.waits:
        return OVER_SECONDS
    is_killed_late = case.fault == "stop" and case.launcher == "torchrun"
    return OVER_SECONDS + case.timeout_seconds + LAUNCHER_KILL_SECONDS * is_killed_late


def _marked(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_fault_ends_the_job_in_time_and_is_shown(tmp_path: Path, case: Case) -> None:
    seconds = _allowed_seconds(case)
    ending = launch(case, tmp_path, patience_seconds=seconds + 20 * case.restarts)
    if case.goes_on:
        assert ending.statuses == [0], ending.stderr
        assert ending.stdout.count("is through") == case.ranks
        return
    # Nobody but a launcher ends a process that does nothing.
    is_left = case.launcher == "bare" and case.fault in ("stop", "away")
    assert ending.stayed == ([case.faulty] if is_left else []), ending.stderr
    assert ending.seconds < seconds
    if case.waits:
        assert ending.seconds > SHORT_SECONDS - 1
    _check_statuses(case, ending)
    _check_what_is_left(case, ending)
    _check_what_is_shown(case, ending)


def _check_statuses(case: Case, ending: Ending) -> None:
    if case.launcher == "torchrun":
        assert ending.statuses == [1]
        return
    own = {"SIGKILL": -signal.SIGKILL, "stop": None, "away": None, "exit": 3}.get(case.fault, 1)
    # A peer that is lost at a run's end is not its survivors' failure.
    peers = 0 if case.place == "end_of_run" else 1
    expected = [own if rank == case.faulty else peers for rank in range(case.ranks)]
    # A rank whose peer exits by itself waits for it, and then has nothing to report.
    assert ending.statuses == expected


def _check_what_is_left(case: Case, ending: Ending) -> None:
    is_export = case.place == "export"
    assert ("model.safetensors" in ending.left) == is_export
    # Only a rank that ran no more of its code leaves a lock.
    assert ("lock" in ending.left) == (is_export and case.fault in SIGNALS)
    assert set(ending.left) <= {"error.json", "model.safetensors", "lock"}


def _check_what_is_shown(case: Case, ending: Ending) -> None:
    if case.place != "end_of_run":
        assert "is through" not in ending.stdout
    elif case.launcher == "bare":  # torchrun may end the survivor before it has said so
        assert "rank 0 is through" in ending.stdout
    names_a_waiting_rank = case.fault in ("stop", "away", "quit")
    if case.waits and case.place == "body" and case.fault != "exit":
        assert "all_reduce('batch size') broke on rank 0 of 2" in ending.stderr
        assert "last seen elsewhere: rank 1 nowhere." in ending.stderr
    if case.launcher == "torchrun" and names_a_waiting_rank:
        assert ending.named_rank == 1 - (case.faulty or 0)
    elif case.launcher == "torchrun" and not _fail_at_one_time(case):
        assert ending.named_rank == case.faulty
        if case.fault in SIGNALS:
            assert f"({case.fault})" in ending.root_cause
    if case.fault in ERRORS:
        _check_traceback(case, ending)


def _fail_at_one_time(case: Case) -> bool:
    """Tell whether several ranks end together, so that the launcher cannot tell who was first."""
    is_carried = case.place in ("broadcast", "all_reduce")
    return case.fault == "exit" or (is_carried and case.group == "caller")


def _check_traceback(case: Case, ending: Ending) -> None:
    error = ERRORS[case.fault]
    assert re.search(rf"Traceback .*\n(.*\n)*?.*{re.escape(error)}", ending.printed)
    if case.place in ("set_up", "after_run"):
        return
    reported = rf"distributed_run: rank {case.faulty} of {case.ranks} failed: .*{error}"
    assert re.search(reported, ending.stderr)
    assert ending.stderr.count("logged before") == case.ranks
    if case.place == "body":
        assert ending.stdout.count("printed before") == case.ranks
    if case.launcher == "torchrun" and case.group == "run":
        # The failing rank's own traceback is in the launcher's summary.
        assert error in ending.root_cause
        assert "Traceback (most recent call last)" in ending.root_cause


def test_exit_hook_does_not_hold_a_failing_rank(tmp_path: Path) -> None:
    ending = launch(Case("body", "raise"), tmp_path, 2 * OVER_SECONDS, SLEEP_AT_EXIT="1")
    assert ending.seconds < OVER_SECONDS
    assert (ending.statuses, ending.stayed) == ([1], [])


@pytest.mark.slow
@pytest.mark.parametrize("goes_to", [os.kill, os.killpg])
def test_interrupt_of_the_launcher_ends_ranks_that_wait(tmp_path: Path, goes_to: object) -> None:
    case = Case("different_collectives", "nothing")
    with start(case, tmp_path) as processes:
        work = tmp_path / "work"
        deadline = time.monotonic() + 60
        while len(list(work.glob("waits-*"))) < case.ranks and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        (work / "fault").write_text(str(time.monotonic()))
        # As a terminal would, which signals the foreground process group.
        (os.killpg if goes_to is os.killpg else os.kill)(processes[0].pid, signal.SIGINT)
        ending = watch(processes, case, tmp_path, patience_seconds=60)
    assert ending.stayed == []
    assert ending.seconds < LAUNCHER_KILL_SECONDS + 5
    assert ending.statuses != [0]


@pytest.mark.slow
def test_error_of_every_rank_is_shown_for_each(tmp_path: Path) -> None:
    ending = launch(Case("body", "raise", faulty=None), tmp_path)
    assert ending.statuses == [1]
    assert re.search(r"ValueError: boom of rank \d", ending.root_cause)


@pytest.mark.parametrize(
    ("place", "fault", "is_success", "text"),
    [
        pytest.param("body", "exit 0", True, "", marks=pytest.mark.slow),
        pytest.param("body", "exit with ()", True, "", marks=pytest.mark.slow),
        pytest.param("body", "exit", False, "exitcode  : 3", marks=pytest.mark.slow),
        pytest.param(
            "body", "exit with a text", False, "no calibration data", marks=pytest.mark.slow
        ),
        ("broadcast", "exit with a text", False, "no calibration data"),
    ],
)
def test_exit_of_every_rank_is_the_status_of_the_job(
    tmp_path: Path, place: str, fault: str, is_success: bool, text: str
) -> None:
    faulty = None if place == "body" else 1
    ending = launch(Case(place, fault, faulty=faulty), tmp_path)
    assert ending.statuses == [0 if is_success else 1]
    assert text in ending.stderr
    # An intentional exit prints no traceback; the launcher's own is of torch.
    assert "job.py" not in ending.printed
    assert "failed:" not in ending.stderr


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("body", "nothing"), marks=pytest.mark.slow, id="once"),
        pytest.param(Case("body", "nothing", runs=20), id="twenty times"),
        pytest.param(Case("body", "nothing", group="caller"), marks=pytest.mark.slow, id="caller"),
    ],
)
def test_run_that_ends_leaves_the_rest_of_the_script_to_go_on(tmp_path: Path, case: Case) -> None:
    ending = launch(case, tmp_path)
    assert ending.statuses == [0], ending.stderr
    assert ending.stdout.count("is through") == 2
    assert ending.left == []


def test_debug_detail_names_a_mismatch_at_once(tmp_path: Path) -> None:
    case = Case("different_collectives", "nothing")
    ending = launch(case, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert ending.statuses == [1]
    assert "'plan'" in ending.stderr
    assert "'batch size'" in ending.stderr
    assert "mismatch" in ending.stderr
