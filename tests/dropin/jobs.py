# SPDX-License-Identifier: Apache-2.0
"""What the tests run in the library: `jobs.py FOLDER CASE ...` runs functions below in a run.

Each rank writes what it came to into FOLDER, as `CASE-...-WORLD_SIZE-RANK.pt`.
"""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from torch import nn
from torch.utils.data import DataLoader

from modelopt.torch.utils import distributed as dist
from modelopt.torch.utils.plugins.expert_parallel import (
    expert_parallel_mesh,
    routed_experts,
    shard_experts,
)
from modelopt.torch.utils.plugins.model_load_utils import fsdp2_wrap

# Far longer than a case takes: one that waits for a peer fails by it, before its test does.
TIMEOUT = timedelta(seconds=90)
CONFIGS = ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG")
NUM_EXPERTS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # With the default of 0.02 experts give so little that a wrong one would pass for right.
    "initializer_range": 0.15,
}


def _llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    return transformers.LlamaForCausalLM(config)


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return transformers.Qwen3MoeForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": _llama, "qwen3_moe": _qwen3_moe}


def _built(name: str) -> Any:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def _combinations() -> Iterator[tuple[str, str, str]]:
    """Yield each model with each config, and a name for both."""
    for model in MODELS:
        for config in CONFIGS:
            yield model, config, f"{model}-{config}"


def _samples() -> Any:
    """Return 8 samples; each has the largest value that some layer sees, or nearly so."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (16,), generator=generator)} for _ in range(8)]


def _quantize(model: Any, config: str, state: Any, ep_mesh: Any = None) -> None:
    """Quantize the model, calibrated on this rank's share of the samples."""
    loader = dist.shard_dataloader(DataLoader(_samples(), 2), state.rank, state.world_size)
    loop = dist.distributed_forward_loop(model, loader, ep_mesh=ep_mesh)
    mtq.quantize(model, getattr(mtq, config), loop)


def _amaxes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the amax of every quantizer that is on, by name."""
    return {n: b.clone() for n, b in model.state_dict().items() if n.endswith("_amax")}


def replicated(state: Any, folder: Path) -> None:
    """Quantize whole models, and export them on rank 0."""
    for name, config, both in _combinations():
        model = _built(name)
        dist.set_distribution_plan(model, dist.DistributionPlan(state.world_size))
        where = folder / f"replicated-{both}-{state.world_size}"
        if state.is_main:
            # Another one, for this leaves something in a model's config that an export trips over.
            _built(name).save_pretrained(f"{where}-before")
        _quantize(model, config, state)
        amaxes, exporters = _amaxes(model), list[int]()

        def export(model: Any = model, where: Path = where, exporters: Any = exporters) -> None:
            exporters.append(state.rank)
            export_hf_checkpoint(model, export_dir=where)

        dist.broadcast_from("export", export)
        # Whoever waited for it finds it done.
        files = sorted(path.name for path in where.iterdir())
        result = {"amaxes": amaxes, "files": files, "exporters": dist.allgather(exporters)}
        torch.save(result, f"{where}-{state.rank}.pt")


def fsdp2(state: Any, folder: Path) -> None:
    """Quantize FSDP2-sharded models."""
    for name, config, both in _combinations():
        model = _built(name)
        dist.set_distribution_plan(model, dist.DistributionPlan(state.world_size, dense="fsdp"))
        fsdp2_wrap(model)
        assert dist.is_fsdp2_model(model)
        assert dist.is_dtensor_sharded(model)
        _quantize(model, config, state)
        result = {"amaxes": _amaxes(model)}
        torch.save(result, folder / f"fsdp2-{both}-{state.world_size}-{state.rank}.pt")


def _expert_parallel(state: Any) -> tuple[Any, Any]:
    """Return a model whose experts are shared out over pairs of ranks, and the mesh of the pair."""
    plan = dist.DistributionPlan(state.world_size, ep_size=2)
    ep_mesh = expert_parallel_mesh(plan, "cpu")["ep"]
    model = _built("qwen3_moe")
    shard_experts(model, ep_mesh)
    dist.set_distribution_plan(model, plan)
    return model, ep_mesh


def expert_parallel(state: Any, folder: Path) -> None:
    """Quantize a model with sharded experts beside a whole one, and compare their logits."""
    for config in CONFIGS:
        model, ep_mesh = _expert_parallel(state)
        _quantize(model, config, state, ep_mesh)
        whole = _built("qwen3_moe")
        dist.set_distribution_plan(whole, dist.DistributionPlan(state.world_size))
        _quantize(whole, config, state)
        batch = torch.stack([_samples()[state.rank]["input_ids"]])
        with torch.no_grad():
            quantized = [m(input_ids=batch).logits for m in (model, whole)]
            for each in (model, whole):
                mtq.disable_quantizer(each, "*")
            plain = [m(input_ids=batch).logits for m in (model, whole)]
        result = {
            "amaxes": _amaxes(model),
            "whole amaxes": _amaxes(whole),
            "quantized": quantized,
            "plain": plain,
            "classes": [type(module).__name__ for module in routed_experts(model).values()],
        }
        where = f"expert_parallel-{config}-{state.world_size}-{state.rank}.pt"
        torch.save(result, folder / where)


def starved(state: Any, folder: Path) -> None:
    """Send no token of ranks 0 and 1 to the experts of rank 1."""
    model, ep_mesh = _expert_parallel(state)
    if state.rank < 2:
        for module in routed_experts(model).values():
            module.register_forward_pre_hook(_to_the_first_half, prepend=True)
    error = None
    try:
        _quantize(model, CONFIGS[0], state, ep_mesh)
    except RuntimeError as raised:
        error = str(raised)
    # The ranks are still in step.
    ranks = dist.all_reduce("alive", lambda: state.rank, list)
    torch.save((error, ranks), folder / f"starved-{state.world_size}-{state.rank}.pt")


def _to_the_first_half(_module: nn.Module, args: Any) -> Any:
    hidden, index, weights = args
    return hidden, index % (NUM_EXPERTS // 2), weights


def older_helpers(state: Any, folder: Path) -> None:
    """Call each of the library's older helpers as its callers do."""
    ran = []

    @dist.master_only
    def on_master(value: int) -> int:
        ran.append(state.rank)
        return value + 1

    group = dist.get_group([0, 1])
    tensors = {"b": torch.ones(2, 3), "a": torch.arange(3)}
    lock = dist.FileLock(str(folder / "lock"))
    acquired = [lock.try_acquire(), dist.FileLock(str(folder / "lock")).try_acquire()]
    dist.barrier()
    if acquired[0]:
        lock.release()
    dist.barrier(group)
    lock.wait()
    result = {
        "who": (dist.rank(), dist.size(), dist.local_rank(), dist.backend()),
        "first and last": (dist.is_master(), dist.is_last_process()),
        "broadcast": dist.broadcast({"rank": state.rank}),
        "broadcast of 1": dist.broadcast([state.rank], src=1, group=group),
        "allgather": dist.allgather(torch.tensor([state.rank] * (state.rank + 1))),
        "allgather in a group": dist.allgather(state.rank, group),
        "allreduce": dist.allreduce(state.rank + 1),
        "allreduce of tensors": dist.allreduce(torch.tensor([1.0, state.rank]), "sum", group),
        "master_only": (on_master(1), ran),
        "broadcast_state_dict": dist.broadcast_state_dict(
            tensors if state.is_main else None, 0, torch.device("cpu"), group
        ),
        "group": (dist.rank(group), dist.size(group)),
        "synced": dist.DistributedProcessGroup.get_dist_syncd_obj(
            state.rank, [dist.DistributedProcessGroup(), dist.DistributedProcessGroup(-1)], max
        ),
        "lock": dist.allgather(acquired),
    }
    dist.cleanup()
    result["group after cleanup"] = dist.is_initialized()
    dist.setup(TIMEOUT, backend="gloo")
    dist.barrier()
    torch.save(result, folder / f"older_helpers-{state.world_size}-{state.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with dist.distributed_run(TIMEOUT, "cpu", backend="gloo") as this_rank:
        for case in sys.argv[2:]:
            globals()[case](this_rank, Path(sys.argv[1]))
