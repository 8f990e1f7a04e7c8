# SPDX-License-Identifier: Apache-2.0
"""Runs as their users start them: by torchrun, on two CPU ranks."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

JOB = Path(__file__).with_name("job.py")
# A fault ends a job within this, the start of the ranks included; their timeout is 10 minutes.
DEADLINE_SECONDS = 60.0


class Launch(NamedTuple):
    """What a launch came to."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def summary(self) -> str:
        """Return torchrun's own account of the failure."""
        return self.stderr.partition("ChildFailedError")[2]

    @property
    def root_cause(self) -> str:
        """Return the part of the summary that names the first failure."""
        return self.summary.partition("Root Cause")[2]


def _torchrun(tmp_path: Path, *arguments: str, **environment: str) -> Launch:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(JOB), *arguments]
    # torchrun leaves a folder behind in TMPDIR.
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    env.pop("PYTHONUNBUFFERED", None)  # buffers are what a rank could lose
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, env=env
    )
    return Launch(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("raise_in_body", "ValueError: boom of rank 1"),
        pytest.param("raise_unprintable", "UnprintableError", marks=pytest.mark.slow),
        pytest.param("raise_in_all_reduce", "ZeroDivisionError", marks=pytest.mark.slow),
        ("raise_in_broadcast", "KeyError: 'missing'"),
        ("interrupt_one", "KeyboardInterrupt"),
    ],
)
def test_error_of_one_rank_ends_the_job_and_is_shown(tmp_path: Path, case: str, error: str) -> None:
    launch = _torchrun(tmp_path, case)
    assert launch.status == 1
    assert f"distributed_run: rank 1 of 2 failed: {error}" in launch.stderr
    printed = launch.stderr.partition("ChildFailedError")[0]
    assert re.search(rf"Traceback .*\n(.*\n)*?.*{re.escape(error)}", printed)
    # The failing rank's own traceback is in the launcher's summary.
    assert error in launch.root_cause
    assert "rank      : 1 " in launch.root_cause
    assert "Traceback (most recent call last)" in launch.root_cause
    assert "is through" not in launch.stdout
    if case == "raise_in_body":
        assert launch.stdout.count("printed before") == 2
        assert launch.stderr.count("logged before") == 2


@pytest.mark.slow
def test_error_of_every_rank_is_shown_for_each(tmp_path: Path) -> None:
    launch = _torchrun(tmp_path, "raise_in_every_rank")
    assert launch.status == 1
    assert re.search(r"ValueError: boom of rank \d", launch.root_cause)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("kill_in_body", marks=pytest.mark.slow),
        "kill_in_all_reduce",
        pytest.param("kill_in_broadcast", marks=pytest.mark.slow),
    ],
)
def test_kill_of_one_rank_ends_the_job_and_is_named(tmp_path: Path, case: str) -> None:
    launch = _torchrun(tmp_path, case)
    assert launch.status == 1
    assert "Signal 9 (SIGKILL)" in launch.root_cause
    assert "rank      : 1 " in launch.root_cause
    assert "is through" not in launch.stdout


@pytest.mark.parametrize(
    ("case", "is_success", "text"),
    [
        pytest.param("exit_0", True, "", marks=pytest.mark.slow),
        ("exit_empty", True, ""),
        pytest.param("exit_3", False, "exitcode  : 3", marks=pytest.mark.slow),
        pytest.param("exit_text", False, "no calibration data", marks=pytest.mark.slow),
        ("exit_in_broadcast", False, "no such model"),
    ],
)
def test_exit_of_every_rank_is_the_status_of_the_job(
    tmp_path: Path, case: str, is_success: bool, text: str
) -> None:
    launch = _torchrun(tmp_path, case)
    assert (launch.status == 0) == is_success
    assert text in launch.stderr
    # An intentional exit prints no traceback; the launcher's own is of torch.
    assert "job.py" not in launch.stderr.partition("ChildFailedError")[0]
    assert "failed:" not in launch.stderr


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("_run", marks=pytest.mark.slow),
        "_run_twenty",
        pytest.param("_run_in_the_callers_group", marks=pytest.mark.slow),
    ],
)
def test_run_that_ends_leaves_the_rest_of_the_script_to_go_on(tmp_path: Path, way: str) -> None:
    launch = _torchrun(tmp_path, "finish", way)
    assert launch.status == 0, launch.stderr
    assert launch.stdout.count("is through") == 2


@pytest.mark.slow
def test_error_in_the_callers_group_still_ends_the_job(tmp_path: Path) -> None:
    launch = _torchrun(tmp_path, "raise_in_body", "_run_in_the_callers_group")
    assert launch.status == 1
    assert "ValueError: boom of rank 1" in launch.stderr


def test_debug_detail_names_a_mismatch_at_once(tmp_path: Path) -> None:
    launch = _torchrun(tmp_path, "different_collectives", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert launch.status == 1
    assert "'plan'" in launch.stderr
    assert "'batch size'" in launch.stderr
    assert "mismatch" in launch.stderr
