# SPDX-License-Identifier: Apache-2.0
"""Load a Hugging Face causal LM over the ranks of a run, as a plan says.

1. `load_pretrained`: the steps, and what each rank checks before it reads
2. The layout on the meta device, which tells transformers' own loader what this rank reads
3. The tensors on disk, read in parts
"""

from __future__ import annotations

import ctypes
import json
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from modelopt.torch.utils.distributed import all_reduce, rank, set_distribution_plan, size
from modelopt.torch.utils.fsdp2_utils import fsdp2_wrap
from modelopt.torch.utils.plugins.expert_parallel import (
    expert_parallel_mesh,
    routed_experts,
    shard_experts,
    stacked_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from torch.distributed.device_mesh import DeviceMesh

    from modelopt.torch.utils.distributed import DistributionPlan

__all__ = ["fsdp2_wrap", "load_pretrained"]

# Small beside the time that reading a layer takes; a trim takes under a millisecond.
_TRIM_SECONDS = 0.01


# -------------------------------------------------------------------------------------- 1. Loading


def load_pretrained(
    path: str | PathLike[str],
    plan: DistributionPlan,
    device: torch.device | str,
    *,
    ep_mesh: DeviceMesh | None = None,
    **settings: Any,
) -> Any:
    """Load a causal LM of which each rank holds what `plan` gives it, and record the plan on it.

    Every rank of the run must call it, with the same arguments but `device`. Each builds the model
    on the meta device and reads its own tensors only from the safetensors files: all of a part that
    is replicated, its shards of one that FSDP2 shards (as `fsdp2_wrap`), its experts of an
    expert-parallel one (as `shard_experts`). What is read passes through CPU memory to `device`.
    What fails on one rank fails on all; a plan that the model cannot follow, before any reading.
    Ranks wait for the slowest one, at most for the group's timeout.

    Args:
        path: A checkpoint folder with safetensors files, which every rank can read.
        plan: How the model is to be placed.
        device: Where this rank computes, such as the `device` of the run's state.
        ep_mesh: `expert_parallel_mesh(plan, ...)["ep"]`, for a caller that passes it on to
            `distributed_forward_loop`; None makes one where the plan needs it.
        settings: More arguments of `from_pretrained`, such as `dtype` ("auto" unless given) and
            `trust_remote_code`.

    Returns:
        The model, in evaluation mode.

    Raises:
        OSError: A file is not there or cannot be read.
        ValueError: The plan is for another number of ranks than are live, or another `ep_mesh`;
            ranks have different plans; `ep_size` does not divide a number of experts.
        RuntimeError: An expert-parallel plan for a model without routed experts of the known kind;
            an FSDP2 plan without a process group, or for a model without decoder layers; tensors
            that the checkpoint lacks; what failed on another rank.
    """
    folder, settings = Path(path), {"dtype": "auto", **settings}
    checked: list[tuple[Any, Any]] = []

    def check() -> DistributionPlan:
        if ep_mesh is not None and ep_mesh.size() != plan.ep_size:
            raise ValueError(
                f"ep_mesh must have ep_size ({plan.ep_size}) ranks; got {ep_mesh}. "
                "Pass expert_parallel_mesh(plan, ...)['ep'], or None."
            )
        checked.append(_check_plan(folder, plan, settings))
        return plan

    all_reduce("load_pretrained: plan", check, _the_one_plan)
    if plan.is_expert_parallel and ep_mesh is None:
        ep_mesh = expert_parallel_mesh(plan, torch.device(device).type)["ep"]
    models: list[Any] = []

    def read() -> None:
        kind, config = checked[0]
        model = _read(_laid_out(kind, plan, ep_mesh), config, folder, settings)
        if plan.is_expert_parallel:
            _keep_local_experts(model)
        models.append(model.to(device))

    all_reduce("load_pretrained: weights", read, len)
    set_distribution_plan(models[0], plan)
    return models[0]


def _check_plan(folder: Path, plan: DistributionPlan, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model's class and config; raise where model or run cannot follow the plan."""
    if plan.world_size != size():
        raise ValueError(
            f"world_size ({plan.world_size}) must be the number of live ranks ({size()}): plan for "
            "those, or launch as many"
        )
    _files(folder)
    trust = {"trust_remote_code": settings.get("trust_remote_code")}
    # A folder that is there: nothing is fetched from the hub.
    config: Any = transformers.AutoConfig.from_pretrained(folder, **trust)  # nosec B615
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, **trust)
    experts: Any
    for name, experts in (routed_experts(model) if plan.is_expert_parallel else {}).items():
        if experts.num_experts % plan.ep_size:
            raise ValueError(
                f"ep_size ({plan.ep_size}) must divide the number of experts "
                f"({experts.num_experts}) of {name}"
            )
    is_of_text = not isinstance(config, type(model.config))
    return type(model), config.get_text_config() if is_of_text else config


def _the_one_plan(plans: list[DistributionPlan]) -> DistributionPlan:
    """Return the plan that every rank has."""
    if any(plan != plans[0] for plan in plans):
        by_rank = "; ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans))
        raise ValueError(f"load_pretrained needs the same plan on every rank; got {by_rank}")
    return plans[0]


def _read(planned: Any, config: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """Return the model on the CPU, with this rank's tensors."""
    tensors = _stored(folder)
    if config.dtype is None:
        config.dtype = _first_floating_dtype(tensors)
    with _freed_memory_returned():
        model, info = planned.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **settings
        )
    if missing := sorted(info["missing_keys"]):
        raise RuntimeError(
            f"load_pretrained needs a whole checkpoint; {folder} lacks {len(missing)} tensors, "
            f"{missing[0]} for one, on rank {rank()}. Write it again with save_pretrained()."
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(folder)  # nosec B615
        model.generation_config = generation
    return model


# ----------------------------------------------------------------- 2. The layout on the meta device


def _laid_out(kind: type[Any], plan: DistributionPlan, ep_mesh: DeviceMesh | None) -> Any:
    """Return a class whose instances are of class `kind`, laid out as the plan says once built.

    transformers builds on the meta device, and reads of each `DTensor` it finds there this rank's
    part only: it slices a stack of experts, and skips the experts of others where there is a tensor
    for each one.
    """

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        self.__class__ = kind
        if plan.is_expert_parallel:
            shard_experts(self, ep_mesh)  # type: ignore[arg-type]
        if plan.is_fsdp_dense:
            fsdp2_wrap(self)
        if plan.is_expert_parallel:
            _mark_local_experts(self, ep_mesh)  # type: ignore[arg-type]

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _mark_local_experts(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Show this rank's experts as its part of the stack of all experts."""
    # Imported here: it costs most of a second on top of torch.
    from torch.distributed.tensor import DTensor, Shard

    for module in routed_experts(model).values():
        for name, stack in stacked_tensors(module).items():
            marked = DTensor.from_local(stack.detach(), ep_mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(marked, stack.requires_grad))


def _keep_local_experts(model: nn.Module) -> None:
    """Turn what was marked into plain tensors."""
    stack: Any
    for module in routed_experts(model).values():
        for name, stack in stacked_tensors(module).items():
            setattr(module, name, nn.Parameter(stack.to_local(), stack.requires_grad))


# --------------------------------------------------------------------------- 3. The tensors on disk


def _stored(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's tensors by name, unread."""
    # Reading leaves nothing mapped, so that a rank's size is what it keeps.
    files: list[Any] = [safe_open(f, framework="pt", backend="pread") for f in _files(folder)]
    return {name: file.get_slice(name) for file in files for name in list(file.keys())}


def _first_floating_dtype(tensors: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of a checkpoint whose config does not say it."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return next((dtypes[t.get_dtype()] for t in tensors.values() if t.get_dtype() in dtypes), None)


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"load_pretrained needs a checkpoint folder with safetensors files; {file} is not "
                "there. save_pretrained() of transformers writes one."
            )
    return files


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Give what is freed in the block back to the system, all along.

    Experts are read one by one and stacked; glibc would keep the pieces, half the model's size.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", lambda _bytes_to_keep: None)
    is_over = threading.Event()

    def keep_trimming() -> None:
        while not is_over.wait(_TRIM_SECONDS):
            trim(0)

    thread = threading.Thread(target=keep_trimming, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
