# SPDX-License-Identifier: Apache-2.0
"""Measure what every fault leads to, here and with the peers, and write it as Markdown.

`python tests/faults/report.py > tests/faults/REPORT.md` takes a quarter of an hour.
"""

import math
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.matrix import (
    CASES,
    ERRORS,
    LAUNCHER_KILL_SECONDS,
    PEERS,
    Case,
    Ending,
    launch,
)

# Long enough to tell a job that waits for it from one that ends at once.
TIMEOUT_SECONDS = 20.0
PATIENCE_SECONDS = TIMEOUT_SECONDS + LAUNCHER_KILL_SECONDS + 15
TITLES = {
    "ours": "This module",
    "torch": "Bare torch: `all_gather_object`, `broadcast_object_list`, `gather_object`",
    "collective_utils": "`torch.distributed.collective_utils`: `all_gather`, `broadcast`",
    "DCP": "DCP's `_DistWrapper`: `all_gather`, `all_reduce`, `broadcast`",
}
HEAD = """# What every fault leads to

Written by `python tests/faults/report.py`: torch {torch}, Python {python}, {cores} cores, two jobs
side by side, so that seconds are upper bounds. Every job is a real launch of gloo ranks whose group
has a timeout of {timeout:.0f} s. One rank fails, in the way and the place that the row says; the
others do their part, and sooner or later wait for it. [matrix.py](matrix.py) lists the cases and
[job.py](job.py) is what is launched; [test_faults.py](test_faults.py) checks this module's rows.

- **fault**: `raise`s a ValueError, runs out of `memory`, is `interrupt`ed (SIGINT), `exit`s
  (`sys.exit(3)`), `quit`s (`os._exit(0)`), is killed by a signal, `stop`s (SIGSTOP), stays `away`,
  returns what does not serialise (a `lock`), or raises an error that is `unprintable`.
- **where**: in the `body` of the job, in the function that a collective runs (`broadcast`,
  `all_reduce`), in one whose error the script has `caught` on every rank and goes on after, and so
  on. `set_up` is before there is a group, `after_run` when it is gone.
- **ranks**: the faulty one of how many. `bare` ranks are plain processes without torchrun,
  `callers` is a group that the script set up itself, `restarted` is `--max-restarts 1`.
- **over after**: whole seconds from the fault until the last process is gone.
- **status**: torchrun's (an attempt that works is 0), or that of each bare rank.
- **named**: the rank that torchrun's summary calls the root cause.
- **error on**: whether the failing rank's own error is on stderr, and in that summary.
- **left**: the files that are left behind.
"""


def main() -> None:
    """Measure all cases and print the tables."""
    cases = [case._replace(timeout_seconds=TIMEOUT_SECONDS) for case in CASES]
    for library, places in PEERS.items():
        cases += [
            case._replace(library=library)
            for case in cases
            if case.library == "ours" and case.place in places
            if case.group == "run" and not case.restarts
        ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        endings = list(pool.map(_ending, cases))
    versions = {"torch": torch.__version__.partition("+")[0], "python": platform.python_version()}
    print(HEAD.format(**versions, cores=os.cpu_count(), timeout=TIMEOUT_SECONDS))
    for library, title in TITLES.items():
        print(f"## {title}\n\n{_in_short(library, cases, endings)}\n")
        print("|fault|where|ranks|over after|status|named|error on|left|")
        print("|---|---|---|---|---|---|---|---|")
        for case, ending in zip(cases, endings, strict=True):
            if case.library == library:
                print(f"|{'|'.join(_row(case, ending))}|")
        print()


def _ending(case: Case) -> Ending:
    with tempfile.TemporaryDirectory() as folder:
        ending = launch(case, Path(folder), PATIENCE_SECONDS)
    print(case.library, case, f"{ending.seconds:.1f} s", file=sys.stderr, flush=True)
    return ending


def _in_short(library: str, cases: list[Case], endings: list[Ending]) -> str:
    own = [pair for pair in zip(cases, endings, strict=True) if pair[0].library == library]
    waited = [ending for _, ending in own if _has_waited(ending)]
    rest = [(case, ending) for case, ending in own if not _has_waited(ending) and not case.restarts]
    caught = [ending.statuses == [0] for case, ending in own if case.place == "caught"]
    shown = [
        ERRORS[case.fault] in ending.root_cause
        for case, ending in own
        if case.fault in ERRORS and case.launcher == "torchrun" and not case.goes_on
    ]
    return (
        f"{len(own)} jobs: {len(waited)} waited for the timeout, the others were over within "
        f"{math.ceil(max(ending.seconds for _, ending in rest))} s. {sum(shown)} of {len(shown)} "
        "errors under torchrun are in its summary. The ranks went on after "
        f"{sum(caught)} of {len(caught)} errors that the script caught."
    )


def _has_waited(ending: Ending) -> bool:
    return ending.seconds > TIMEOUT_SECONDS - 1


def _row(case: Case, ending: Ending) -> list[str]:
    over = f"{math.ceil(ending.seconds)} s"
    if _has_waited(ending):
        over += ", **the timeout**"
    if ending.stayed:
        over += f"; rank {', '.join(map(str, ending.stayed))} stays"
    elif None in ending.statuses:
        over = "**never**"
    _, _, ranks = str(case).split("-", 2)
    statuses = ["none" if s is None else str(s) for s in ending.statuses]
    named = "" if ending.named_rank is None else str(ending.named_rank)
    error, shown = ERRORS.get(case.fault), ""
    if error and case.place != "caught":
        places = {"stderr": ending.printed, "summary": ending.root_cause}
        shown = ", ".join(name for name, text in places.items() if error in text) or "none"
    left = ", ".join(sorted(set(ending.left)))
    return [case.fault, case.place, ranks, over, ", ".join(statuses), named, shown, left]


if __name__ == "__main__":
    main()
