# SPDX-License-Identifier: Apache-2.0
"""What differs on GPUs: device binding, what moves over NCCL, models on devices, the main job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).with_name("job.py")
SCRIPT = Path(__file__).parent.parent / "examples" / "hf_ptq.py"
# A job is over within this, the start of its ranks included; their timeout is 10 minutes.
DEADLINE_SECONDS = 110.0
GPUS = torch.cuda.device_count()

ON_ONE_GPU = [
    "bind_nothing_on_cpu_ranks",
    "decide_together_on_a_gpu_only_group",
    "gather_through_chunks_of_device_memory",
    "gather_without_device_memory",
    "shard_with_an_fp32_router",
    "load_by_every_plan",
    "calibrate_in_one_process",
]
ON_TWO_GPUS = [
    "bind_before_set_up",
    "bind_in_the_callers_group",
    "bind_nothing_on_cpu_ranks",
    "decide_together_on_a_gpu_only_group",
    "fail_together_on_a_gpu_only_group",
    "gather_through_chunks_of_device_memory",
    "gather_without_device_memory",
    "shard_with_an_fp32_router",
    "load_by_every_plan",
    "run_twenty",
    "set_up_twice",
]


def _needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} CUDA devices; there are {GPUS}")


def _launch(tmp_path: Path, gpus: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run(
        [sys.executable, *(launcher if gpus > 1 else []), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        # torchrun leaves a folder behind in TMPDIR.
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("gpus", "case"),
    [pytest.param(1, case, marks=_needs(1)) for case in ON_ONE_GPU]
    + [pytest.param(2, case, marks=_needs(2)) for case in ON_TWO_GPUS],
)
def test_job_works_on_gpus(tmp_path: Path, gpus: int, case: str) -> None:
    done = _launch(tmp_path, gpus, str(JOB), case)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") == gpus


@_needs(2)
def test_error_of_one_rank_ends_the_job_and_is_its_root_cause(tmp_path: Path) -> None:
    done = _launch(tmp_path, 2, str(JOB), "raise_in_body")
    assert done.returncode == 1
    assert "distributed_run: rank 1 of 2 failed: ValueError: boom of rank 1" in done.stderr
    root_cause = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in root_cause
    assert "ValueError: boom of rank 1" in root_cause


@pytest.mark.parametrize("ep_size", ["1", "2"])
@pytest.mark.parametrize("dense", ["replicate", "fsdp"])
@pytest.mark.parametrize(
    "gpus", [pytest.param(1, marks=_needs(1)), pytest.param(2, marks=_needs(2))]
)
def test_main_job_writes_a_checkpoint(tmp_path: Path, gpus: int, dense: str, ep_size: str) -> None:
    if gpus == 1 and (dense, ep_size) != ("replicate", "1"):
        pytest.skip("one process shards nothing")
    export = tmp_path / "fp8"
    options = ["--num-samples=8", "--sample-length=64", f"--dense={dense}", f"--ep-size={ep_size}"]
    done = _launch(tmp_path, gpus, str(SCRIPT), "--device=cuda", *options, f"--export={export}")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint         {export}" in done.stdout
    assert (export / "model.safetensors").is_file()
