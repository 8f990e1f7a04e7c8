# SPDX-License-Identifier: Apache-2.0
"""Where am I, the groups a module works in, and the public surface."""

import doctest
import functools
import io
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from _test_utils.torch.distributed.utils import DistributedWorkerPool, bounded_collectives

import modelopt.torch.utils.distributed as mdist

ALL = """
DistributedProcessGroup DistributedState DistributionPlan ParallelState all_reduce backend barrier
broadcast_from distributed_forward_loop distributed_run distribution_plan fsdp2_wrap gather_bytes
gather_state_dicts is_available is_distributed_launch is_distributed_run is_fsdp2_model
is_initialized is_master rank set_distribution_plan shard_dataloader size
"""
UNEXPORTED = """
local_rank is_last_process setup cleanup abort broadcast allgather allreduce master_only
broadcast_state_dict get_group is_dtensor_sharded FileLock _serialize
"""


def test_public_surface_is_the_contract() -> None:
    assert mdist.__all__ == ALL.split()
    assert all(hasattr(mdist, name) for name in (ALL + UNEXPORTED).split())


def test_examples_of_the_docstrings_run() -> None:
    failed, attempted = doctest.testmod(mdist)
    assert (failed, attempted > 5) == (0, True)


def test_import_leaves_the_costly_modules_of_torch_alone() -> None:
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import modelopt.torch.utils.distributed\n"
        "new = {name for name in set(sys.modules) - before if not name.startswith('modelopt')}\n"
        "assert not [name for name in new if name.startswith(('torch', 'transformers'))], new\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_one_process_is_rank_0_of_1() -> None:
    assert mdist.is_available()
    assert not mdist.is_initialized()
    assert mdist.backend() is None
    assert (mdist.rank(), mdist.size()) == (0, 1)
    assert mdist.is_master()
    assert mdist.is_last_process()
    assert not mdist.is_distributed_run()
    assert mdist.get_group([0]) is None
    mdist.barrier()


def _answers(rank: int, size: int) -> None:
    assert mdist.is_initialized()
    assert mdist.backend() == "torch"
    assert (mdist.rank(), mdist.size()) == (rank, size)
    assert mdist.is_master() == (rank == 0)
    assert mdist.is_last_process() == (rank == size - 1)
    assert mdist.is_distributed_run()
    assert not mdist.is_distributed_launch()


def test_queries_answer_from_the_live_group(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_answers)


def _answers_of_groups(rank: int, size: int) -> None:
    one, both = mdist.get_group([1]), mdist.get_group([0, 1])
    assert torch.distributed.get_backend(both) == "gloo"
    assert (mdist.rank(both), mdist.size(both)) == (rank, 2)
    if rank == 1:
        assert (mdist.rank(one), mdist.size(one)) == (0, 1)
        assert mdist.is_master(one)
        assert mdist.is_last_process(one)
        mdist.barrier(one)
    mdist.barrier(both)


def test_queries_take_a_group(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_answers_of_groups)


def _group_timeout(rank: int, size: int) -> list[timedelta]:
    groups: list[Any] = [torch.distributed.group.WORLD, mdist.get_group([0, 1])]
    timeouts = []
    for group in groups:
        backend = group._get_backend(torch.device("cpu"))
        timeouts.append(getattr(backend, "wrapped_pg", backend).options._timeout)
    return timeouts


def test_get_group_waits_no_longer_than_the_run(cpu_dist_workers: DistributedWorkerPool) -> None:
    for run, made in cpu_dist_workers.run(_group_timeout):
        assert made == run != torch.distributed.default_pg_timeout


def _one_rank_group(rank: int, size: int) -> None:
    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert mdist.is_initialized()
    assert not mdist.is_distributed_run()
    mdist.barrier()


def test_one_rank_group_is_no_run(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_one_rank_group)


def _barrier(rank: int, size: int) -> str:
    with bounded_collectives(timedelta(seconds=1)):
        mdist.barrier()  # connected: a rank that left earlier would close sockets in the making
        if rank == 0:
            return ""
        with pytest.raises(RuntimeError) as caught:
            mdist.barrier()
        return str(caught.value)


def test_barrier_waits_for_every_rank(cpu_dist_workers: DistributedWorkerPool) -> None:
    assert cpu_dist_workers.run(_barrier)[1]


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("1", False), ("2", True)]
)
def test_is_distributed_launch_reads_world_size(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    if value is not None:
        monkeypatch.setenv("WORLD_SIZE", value)
    assert mdist.is_distributed_launch() is expected


@pytest.mark.parametrize("value", ["two", "2.0", " "])
@pytest.mark.parametrize(
    ("name", "query"),
    [("WORLD_SIZE", mdist.is_distributed_launch), ("LOCAL_RANK", mdist.local_rank)],
)
def test_environment_that_is_no_whole_number_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, query: functools.partial[object], value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}.*{value!r}"):
        query()


def test_local_rank_reads_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert mdist.local_rank() == 3


def _local_rank_without_its_variable(rank: int, size: int) -> None:
    with pytest.warns(UserWarning, match="LOCAL_RANK is not set"):
        assert mdist.local_rank() == rank


def test_local_rank_falls_back_to_the_global_rank(
    cpu_dist_workers: DistributedWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_dist_workers.run(_local_rank_without_its_variable)
    # Before a group is up, so that the device bound then is the one a run computes on later.
    monkeypatch.setenv("RANK", "3")
    with pytest.warns(UserWarning, match="LOCAL_RANK is not set"):
        assert mdist.local_rank() == 3


def test_unused_group_answers_minus_one() -> None:
    for group in (mdist.DistributedProcessGroup(), mdist.DistributedProcessGroup(-1)):
        assert not group.is_initialized()
        assert (group.rank(), group.world_size()) == (-1, -1)
        assert mdist.DistributedProcessGroup.get_dist_syncd_obj(7, group, sum) == 7


def _sync_over_groups(rank: int, size: int) -> None:
    every = mdist.DistributedProcessGroup()
    own = [mdist.get_group([member]) for member in range(size)][rank]
    alone, unused = mdist.DistributedProcessGroup(own), mdist.DistributedProcessGroup(-1)
    assert (every.rank(), every.world_size()) == (rank, size)
    assert (alone.rank(), alone.world_size()) == (0, 1)
    assert f"rank={rank}, world_size={size}" in repr(every)
    sync = mdist.DistributedProcessGroup.get_dist_syncd_obj
    assert sync(rank, every, list) == [0, 1]
    assert sync(rank, [alone, unused, every], list) == [[0], [1]]
    assert sync(rank, [unused], list) == rank


def test_sync_goes_over_used_groups_in_turn(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_sync_over_groups)


def _parallel_state(rank: int, size: int) -> None:
    both = mdist.get_group([0, 1])
    state = mdist.ParallelState(expert_model_parallel_group=both)
    assert state.data_parallel_group.world_size() == size
    assert not state.tensor_parallel_group.is_initialized()
    assert state.expert_model_parallel_group.group is both
    assert "tensor_parallel_group=DistributedProcessGroup(group=-1" in repr(state)
    assert not mdist.ParallelState(-1).data_parallel_group.is_initialized()


def test_parallel_state_holds_three_groups(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_parallel_state)


def test_serialize_gives_bytes_that_torch_loads() -> None:
    data = mdist._serialize({"a": torch.arange(3)})
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    loaded = torch.load(io.BytesIO(bytes(data.tolist())))
    assert torch.equal(loaded["a"], torch.arange(3))
