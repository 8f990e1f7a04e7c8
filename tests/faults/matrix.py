# SPDX-License-Identifier: Apache-2.0
"""The faults, where they strike, and a launch that shows what comes of one.

`CASES` is what test_faults.py checks and report.py tabulates; job.py is what a case launches.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
# Far longer than anybody waits: a job that ends in time did not end by the timeout.
LONG_SECONDS = 600.0
# Of a job whose peers must wait for the timeout.
SHORT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_START_SECONDS = 60.0
# What torchrun gives a rank that takes no SIGTERM.
LAUNCHER_KILL_SECONDS = 30.0

SIGNALS = ("SIGKILL", "SIGTERM", "SIGABRT")
ERRORS = {
    "raise": "ValueError: boom of rank",
    "memory": "MemoryError",
    "interrupt": "KeyboardInterrupt",
    "unprintable": "UnprintableError",
    "lock": "cannot pickle '_thread.lock' object",
}
# The places that peers have as well.
PEERS = {
    "torch": (
        "body",
        "broadcast",
        "all_reduce",
        "combine",
        "gather_state_dicts",
        "caught",
        "set_up",
    ),
    "collective_utils": ("broadcast", "all_reduce", "caught"),
    "DCP": ("broadcast", "all_reduce", "combine", "caught"),
}


class Case(NamedTuple):
    """One fault, and where it strikes.

    Attributes:
        place: A key of job.py's `PLACES`.
        fault: A key of job.py's `FAULTS`.
        faulty: The rank that it strikes; None is all of them.
        ranks: The number of ranks.
        launcher: "torchrun", or "bare": processes that nobody watches.
        group: Whose group it is: the "run" sets it up, or its "caller".
        runs: How often the run is repeated.
        restarts: torchrun's `--max-restarts`; the fault strikes the first attempt only.
        library: A key of job.py's `PLACES`.
        timeout_seconds: The group's timeout.
    """

    place: str
    fault: str
    faulty: int | None = 1
    ranks: int = 2
    launcher: str = "torchrun"
    group: str = "run"
    runs: int = 1
    restarts: int = 0
    library: str = "ours"
    timeout_seconds: float = LONG_SECONDS

    def __str__(self) -> str:
        """Return the case as a test's id."""
        parts = [self.fault, self.place, f"{self.faulty}of{self.ranks}"]
        parts += ["bare"] * (self.launcher == "bare") + ["callers"] * (self.group == "caller")
        return "-".join(parts + ["restarted"] * self.restarts)

    @property
    def waits(self) -> bool:
        """Tell whether peers wait for the timeout, as the README says."""
        is_lone_exit = self.fault == "exit" and self.place not in ("broadcast", "all_reduce")
        is_lone_exit = is_lone_exit and self.faulty is not None
        # Nobody tells a rank without a launcher of a peer that never came to set the group up.
        is_unseen = self.launcher == "bare" and self.place == "set_up"
        return self.fault in ("stop", "away") or is_lone_exit or is_unseen

    @property
    def goes_on(self) -> bool:
        """Tell whether the job ends well nevertheless."""
        return self.place == "caught" or self.restarts > 0


def _cases() -> Iterator[Case]:
    places = ("body", "broadcast", "all_reduce", "combine", "gather_bytes", "gather_state_dicts")
    for place in (*places, "forward_loop", "export", "set_up", "after_run"):
        yield Case(place, "raise")
        yield Case(place, "SIGKILL")
    yield Case("end_of_run", "SIGKILL")
    for fault in ("memory", "interrupt", "unprintable", "exit", "quit", "SIGTERM", "SIGABRT"):
        yield Case("body", fault)
    for place in ("all_reduce", "gather_state_dicts", "forward_loop"):
        yield Case(place, "memory")
    for fault in ("exit", "interrupt", "lock"):
        yield Case("all_reduce", fault)
    yield Case("caught", "raise")
    yield Case("caught", "lock")
    for place in ("set_up", "body"):
        yield Case(place, "away")
    yield Case("body", "stop")
    # Rank 0 does more: it receives what is gathered and, without torchrun, serves the store.
    yield Case("gather_bytes", "memory", faulty=0)
    yield Case("all_reduce", "raise", faulty=3, ranks=4)
    yield Case("body", "SIGKILL", faulty=0, ranks=4)
    for place, fault in (("body", "raise"), ("body", "SIGKILL"), ("all_reduce", "raise")):
        yield Case(place, fault, group="caller")
    for place, fault in (("body", "raise"), ("set_up", "SIGKILL")):
        yield Case(place, fault, restarts=1)
    for place, fault in (("body", "raise"), ("all_reduce", "raise"), ("body", "SIGKILL")):
        yield Case(place, fault, launcher="bare")
    yield Case("all_reduce", "SIGKILL", faulty=0, launcher="bare")
    yield Case("end_of_run", "SIGKILL", launcher="bare")
    yield Case("combine", "memory", faulty=3, ranks=4, launcher="bare")
    yield Case("body", "raise", launcher="bare", group="caller")
    for place, fault in (("set_up", "raise"), ("body", "away"), ("body", "stop"), ("body", "exit")):
        yield Case(place, fault, launcher="bare")


CASES = [case._replace(timeout_seconds=SHORT_SECONDS) if case.waits else case for case in _cases()]


class Ending(NamedTuple):
    """What a launch came to.

    Attributes:
        seconds: From the fault (without one, from the start) until the last process that went.
        statuses: The launcher's exit status, or without one each rank's; None for one that stayed.
        stayed: The ranks whose processes had to be killed in the end.
        left: The files that are left behind, by their names.
        stdout: What all processes printed.
        stderr: Likewise.
    """

    seconds: float
    statuses: list[int | None]
    stayed: list[int]
    left: list[str]
    stdout: str
    stderr: str

    @property
    def summary(self) -> str:
        """Return torchrun's own account of the failure."""
        return self.stderr.partition("ChildFailedError")[2]

    @property
    def printed(self) -> str:
        """Return what the ranks themselves wrote to stderr."""
        return self.stderr.partition("ChildFailedError")[0]

    @property
    def root_cause(self) -> str:
        """Return the part of the summary that names the first failure."""
        return self.summary.partition("Root Cause")[2]

    @property
    def named_rank(self) -> int | None:
        """Return the rank that the summary takes for the first to fail."""
        found = re.search(r"rank +: (\d+) ", self.root_cause)
        return int(found[1]) if found else None


def launch(
    case: Case, folder: Path, patience_seconds: float = LONG_SECONDS, **environment: str
) -> Ending:
    """Launch a case in an empty folder and watch until every process is gone.

    Args:
        case: What to launch.
        folder: Where the job works; its TMPDIR too.
        patience_seconds: Time from the fault after which what still runs is killed.
        **environment: Variables for the job.
    """
    with start(case, folder, **environment) as processes:
        return watch(processes, case, folder, patience_seconds)


@contextlib.contextmanager
def start(case: Case, folder: Path, **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the launcher, or without one each rank; end whatever is left of them on leaving."""
    for name in ("tmp", "work"):
        (folder / name).mkdir()
    job = [str(TESTS / "faults" / "job.py"), json.dumps(case._asdict()), str(folder / "work")]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    env |= {"TMPDIR": str(folder / "tmp")}
    env.pop("PYTHONUNBUFFERED", None)  # buffers are what a rank could lose
    commands = [([sys.executable, *job], env | rank) for rank in _bare_ranks(case.ranks)]
    if case.launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d"]
        torchrun += ["--rdzv-endpoint=localhost:0", f"--max-restarts={case.restarts}"]
        commands = [([sys.executable, *torchrun, f"--nproc-per-node={case.ranks}", *job], env)]
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        processes = [
            # A session of its own, so that a test can signal it as a terminal would.
            subprocess.Popen(c, stdout=stdout, stderr=stderr, env=e, start_new_session=True)
            for c, e in commands
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for pid in _pids_of_ranks(folder):
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def watch(
    processes: list[subprocess.Popen[bytes]],
    case: Case,
    folder: Path,
    patience_seconds: float = LONG_SECONDS,
) -> Ending:
    """Watch started processes until all are gone, or what remains has stayed for too long."""
    begin = last_gone = time.monotonic()
    alive: set[int] = set()
    while True:
        struck = fault_time(folder)
        now = time.monotonic()
        if not struck and now > begin + _START_SECONDS:
            break
        if struck and now > struck + patience_seconds:
            break
        launched = {process.pid for process in processes if process.poll() is None}
        before, alive = alive, launched | {pid for pid in _pids_of_ranks(folder) if _is_alive(pid)}
        if before - alive:
            last_gone = now
        if not alive:
            break
        time.sleep(_POLL_SECONDS)
    ranks = _pids_of_ranks(folder)
    return Ending(
        last_gone - (fault_time(folder) or begin),
        [process.poll() for process in processes],
        sorted({ranks[pid] for pid in alive if pid in ranks}),
        sorted(_left(folder / "tmp") + _left(folder / "work")),
        (folder / "stdout").read_text(),
        (folder / "stderr").read_text(),
    )


def fault_time(folder: Path) -> float | None:
    """Return when the fault struck, on the monotonic clock that all processes share."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return float((folder / "work" / "fault").read_text())
    return None


def _bare_ranks(ranks: int) -> list[dict[str, str]]:
    # Below the ports that the system hands out by itself, so that nobody else takes this one.
    while True:
        port = random.randrange(20000, 32000)  # noqa: S311
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("localhost", port))
            break
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [{"RANK": str(r), "LOCAL_RANK": str(r), **shared} for r in range(ranks)]


def _pids_of_ranks(folder: Path) -> dict[int, int]:
    """Return the rank of each process id that a rank wrote down."""
    names = (path.name.split("-") for path in (folder / "work").glob("rank-*"))
    return {int(pid): int(rank) for _, rank, pid in names}


def _is_alive(pid: int) -> bool:
    """Tell whether the process runs or is stopped; a zombie is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _left(folder: Path) -> list[str]:
    ours = re.compile(r"fault|rank-\d+-\d+|waits-\d+")
    return [p.name for p in folder.rglob("*") if p.is_file() and not ours.fullmatch(p.name)]
