# SPDX-License-Identifier: Apache-2.0
"""What test_nccl.py launches: `job.py CASE` runs one of the functions below, on one GPU or more."""

import contextlib
import functools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from torch.utils.data import DataLoader

from modelopt.torch.utils.distributed import (
    DistributedState,
    DistributionPlan,
    all_reduce,
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_from,
    broadcast_state_dict,
    distributed_forward_loop,
    distributed_run,
    gather_bytes,
    gather_state_dicts,
    is_distributed_launch,
    is_dtensor_sharded,
    is_fsdp2_model,
    local_rank,
    master_only,
    rank,
    set_distribution_plan,
    setup,
    shard_dataloader,
    size,
)
from modelopt.torch.utils.plugins.expert_parallel import expert_parallel_mesh
from modelopt.torch.utils.plugins.model_load_utils import fsdp2_wrap, load_pretrained

# Far longer than any test waits: a job that ends in time did not end by the timeout.
TIMEOUT = timedelta(minutes=10)
MIB = 2**20


# ------------------------------------------------------------------------------ Device binding


def bind_before_set_up() -> None:
    """The device is bound when the group is set up, or NCCL would take GPU 0 on every rank."""
    bound_at_set_up: list[int] = []
    init = torch.distributed.init_process_group

    def watch(*args: Any, **kwargs: Any) -> None:
        bound_at_set_up.append(torch.cuda.current_device())
        init(*args, **kwargs)

    torch.distributed.init_process_group = watch
    with distributed_run(TIMEOUT) as state:
        assert bound_at_set_up == [local_rank()] == [torch.cuda.current_device()]
        assert state.device == torch.device(f"cuda:{local_rank()}")
        assert torch.distributed.get_backend_config() == "cpu:gloo,cuda:nccl"
        devices = all_reduce("device", torch.cuda.current_device, list)
        assert devices == list(range(size()))
        # One communicator on each GPU, and gloo beside it.
        for device in state.device, "cpu":
            ones = torch.ones(3, device=device)
            torch.distributed.all_reduce(ones)
            assert ones.tolist() == [size()] * 3
        barrier()


def bind_in_the_callers_group() -> None:
    """A run inside a caller's group binds the device too, and leaves the group alone."""
    torch.distributed.init_process_group("nccl", timeout=TIMEOUT)
    with distributed_run(TIMEOUT) as state:
        assert torch.cuda.current_device() == local_rank()
        assert state.device == torch.device(f"cuda:{local_rank()}")
    assert torch.distributed.is_initialized()
    torch.distributed.destroy_process_group()


def bind_nothing_on_cpu_ranks() -> None:
    """CPU ranks touch no GPU."""
    with distributed_run(TIMEOUT, "cpu", backend="gloo"):
        assert all_reduce("rank", rank, list) == list(range(size()))
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


# ------------------------------------------------------------ Objects and bytes on a GPU-only group


@contextlib.contextmanager
def _gpu_only_run() -> Iterator[DistributedState]:
    """A run whose group has no CPU backend, so that all it moves passes through the GPUs."""
    torch.cuda.set_device(local_rank() if is_distributed_launch() else 0)
    kwargs: dict[str, Any] = {}
    if not is_distributed_launch():
        kwargs = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl", timeout=TIMEOUT, **kwargs)
    try:
        with distributed_run(TIMEOUT) as state:
            device = torch.device("cuda", torch.cuda.current_device())
            yield DistributedState(state.rank, state.world_size, device)
    finally:
        # A rank that failed must not wait for its peers here.
        if sys.exc_info()[0] is None:
            torch.distributed.destroy_process_group()


def decide_together_on_a_gpu_only_group() -> None:
    """Objects, the older helpers' too, travel over NCCL; received tensors load onto the CPU."""
    with _gpu_only_run() as state:
        last = size() - 1
        assert broadcast_from("plan", lambda: {"rank": rank()}, last) == {"rank": last}
        assert all_reduce("batch size", lambda: 8 - rank(), min) == 8 - last
        tensor = torch.full((3,), float(rank()), device=state.device)
        received = broadcast_from("tensor", lambda: tensor, last)
        assert received.device.type == ("cuda" if rank() == last else "cpu")
        assert received.tolist() == [last] * 3
        tensors = all_reduce("tensors", lambda: tensor, list)
        assert {t.device.type for t in tensors} == ({"cpu"} if size() > 1 else {"cuda"})
        assert broadcast([rank()], last) == [last]
        assert allgather(rank()) == list(range(size()))
        assert allreduce(1) == size()
        assert master_only(lambda: "rank 0's")() == "rank 0's"
        state_dict = {"fp8": torch.arange(4.0).to(torch.float8_e4m3fn), "none": torch.empty(0)}
        sent = broadcast_state_dict(state_dict if rank() == last else None, last, state.device)
        assert list(sent) == list(state_dict)
        assert all(t.device == state.device for t in sent.values())
        assert sent["fp8"].float().tolist() == [0, 1, 2, 3]
        states = list(gather_state_dicts({"own": tensor}, last))
        assert [s["own"].tolist() for s in states] == (
            [[float(r)] * 3 for r in range(size())] if rank() == last else []
        )
        assert all(s["own"].device.type == "cpu" for s in states)


def fail_together_on_a_gpu_only_group() -> None:
    """A failure reaches every rank through NCCL, and the ranks stay in step."""
    with _gpu_only_run():
        last = size() - 1
        try:
            all_reduce("divide", lambda: 1 // (last - rank()), sum)
        except ZeroDivisionError:
            assert rank() == last
        except RuntimeError as error:
            assert f"failed on rank {last}: ZeroDivisionError" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a rank did not learn of the failure")
        assert all_reduce("in step", rank, list) == list(range(size()))


def _gathered_with_peak(chunk_bytes: int) -> int:
    """Gather 64 MiB of each rank on rank 0; return the device memory that this took."""
    data = bytes([rank() + 1]) * (64 * MIB)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gathered = gather_bytes(data, 0, chunk_bytes=chunk_bytes)
    peak = torch.cuda.max_memory_allocated() - before
    if rank() == 0:
        assert gathered is not None
        for source, payload in enumerate(gathered):
            assert len(payload) == 64 * MIB
            assert payload == bytes([source + 1]) * (64 * MIB)
    else:
        assert gathered is None
    return peak


def gather_through_chunks_of_device_memory() -> None:
    """On a GPU-only group a gather takes no more device memory than the chunks in flight."""
    with _gpu_only_run():
        _gathered_with_peak(MIB)  # what the first use allocates is no part of a gather
        for chunk_bytes in MIB, 8 * MIB:
            part = functools.partial(_gathered_with_peak, chunk_bytes)
            peaks = all_reduce("peak", part, list)
            assert max(peaks) <= size() * chunk_bytes + MIB, peaks
        assert max(peaks) >= 8 * MIB or size() == 1


def gather_without_device_memory() -> None:
    """On a group with a CPU backend a gather takes none at all."""
    with distributed_run(TIMEOUT):
        assert all_reduce("peak", lambda: _gathered_with_peak(8 * MIB), max) == 0


# ------------------------------------------------------------------------------ Models on GPUs


def _tiny_moe(dtype: torch.dtype) -> Any:
    """Return a Glm4-MoE, which computes its routing in float32 in any case."""
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        initializer_range=0.15,
    )
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype).eval()


def _tokens(device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(0, 64, (2, 7 + rank()), generator=generator).to(device)


@contextlib.contextmanager
def _run_with_group() -> Iterator[DistributedState]:
    """A run with a group, also where there is one process: of one rank then, which the run ends."""
    with distributed_run(TIMEOUT, "cuda") as state:
        if not torch.distributed.is_initialized():
            torch.cuda.set_device(0)
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1
            )
        device = torch.device("cuda", torch.cuda.current_device())
        yield DistributedState(state.rank, state.world_size, device)


def shard_with_an_fp32_router() -> None:
    """FSDP2 leaves the float32 routers whole, on the device that computes."""
    with _run_with_group() as state, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _tiny_moe(torch.bfloat16)
        for layer in model.model.layers:
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.float()
        fsdp2_wrap(model)
        assert is_fsdp2_model(model)
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            assert router.device == state.device
            assert router.dtype == torch.float32
            assert not hasattr(router, "to_local")
            assert layer.self_attn.q_proj.weight.to_local().device == state.device
        kept = [str(w.message) for w in caught if "fsdp2_wrap keeps 2 param" in str(w.message)]
        assert len(kept) == (rank() == 0)
        whole, tokens = _tiny_moe(torch.bfloat16).to(state.device), _tokens(state.device)
        with torch.no_grad():
            logits, expected = model(tokens).logits, whole(tokens).logits
        assert (logits - expected).norm() < 0.05 * expected.norm()


def load_by_every_plan() -> None:
    """A model that was loaded by a plan gives the logits of the whole one, and calibrates."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with _run_with_group() as state, tempfile.TemporaryDirectory() as own:
        folder = Path(broadcast_from("folder", lambda: own))
        whole = _tiny_moe(torch.float32)
        broadcast_from("checkpoint", lambda: whole.save_pretrained(folder))
        whole = whole.to(state.device)
        for ep_size in {1, size()}:
            for dense in "replicate", "fsdp":
                plan = DistributionPlan(size(), ep_size, dense)
                mesh = expert_parallel_mesh(plan, "cuda")["ep"] if ep_size > 1 else None
                model = load_pretrained(folder, plan, state.device, ep_mesh=mesh)
                assert all(p.device == state.device for p in model.parameters())
                assert is_dtensor_sharded(model) == plan.is_fsdp_dense
                tokens = _tokens(state.device)
                with torch.no_grad():
                    expected, logits = whole(tokens).logits, model(tokens).logits
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
                dataset: Any = [{"input_ids": row} for row in torch.arange(32).view(8, 4)]
                loader = shard_dataloader(DataLoader(dataset, 2), rank(), size())
                distributed_forward_loop(model, loader, state.device, mesh)(None)


def calibrate_in_one_process() -> None:
    """One process sets nothing up, and its batches are moved to its GPU."""
    with distributed_run(device="cuda:0") as state:
        assert state == DistributedState(0, 1, "cuda:0")
        assert not torch.distributed.is_initialized()
        model = _tiny_moe(torch.bfloat16).to(state.device)
        set_distribution_plan(model, DistributionPlan())
        seen: list[torch.device] = []
        model.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].device),
            with_kwargs=True,
        )
        dataset: Any = [{"input_ids": torch.arange(8)}] * 4
        loader: Any = DataLoader(dataset, 2)
        distributed_forward_loop(model, loader, state.device)(model)
        assert seen == [torch.device("cuda:0")] * 2


# ------------------------------------------------------------------------------- Ending together


def raise_in_body() -> None:
    """The last rank raises while the others sit in an NCCL collective."""
    with distributed_run(TIMEOUT) as state:
        if rank() == size() - 1:
            raise ValueError(f"boom of rank {rank()}")
        torch.distributed.all_reduce(torch.ones(1, device=state.device))
        torch.cuda.synchronize()


def run_twenty() -> None:
    """Runs follow one another."""
    for turn in range(20):
        with distributed_run(TIMEOUT):
            assert all_reduce("turn", functools.partial(int, turn), set) == {turn}


def set_up_twice() -> None:
    """A second set-up leaves the group alone."""
    setup(TIMEOUT)
    group = torch.distributed.group.WORLD
    setup(TIMEOUT)
    assert torch.distributed.group.WORLD is group
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("through", flush=True)
