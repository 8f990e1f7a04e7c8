# SPDX-License-Identifier: Apache-2.0
"""Shard a causal LM with FSDP2, one group for each decoder layer; no Hugging Face import needed."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from modelopt.torch.utils.distributed import is_initialized, is_master, size

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["decoder_layers", "fsdp2_wrap"]


def fsdp2_wrap(
    model: nn.Module,
    shard_root: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
) -> list[nn.Module]:
    """Shard each decoder layer of a Hugging Face causal LM with `fully_shard`, and the root.

    Every rank of the run must call it, on the same model. A layer is gathered for its forward and
    sharded again after it. Parameters whose dtype differs from the dominant one (by element count),
    such as an fp32 router in a bf16 model, stay whole on every rank, for FSDP2 takes one dtype per
    group; one warning on rank 0 says how many. Experts that `shard_experts` shared out stay as they
    are, too: their `_parallel_state` names the group that they are shared out over.

    Args:
        model: A causal LM, or a VLM with one for its language part; changed in place.
        shard_root: Whether to shard what is outside the layers too: embeddings, head, final norm.
        mp_policy: FSDP2's mixed precision; None computes in the parameters' dtype.
        cpu_offload: Whether GPU ranks keep their shards on the CPU between forwards.

    Returns:
        The decoder layers.

    Raises:
        RuntimeError: The model has no decoder layers, or no process group is up.
    """
    # Imported here: it costs most of a second on top of torch.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    if not is_initialized():
        raise RuntimeError("fsdp2_wrap needs a process group; call it inside distributed_run()")
    layers = decoder_layers(model)
    device = _compute_device()
    # The shards of CPU ranks are on the CPU as they are.
    offloads = cpu_offload and device.type != "cpu"
    settings: dict[str, Any] = {
        "mesh": torch.distributed.init_device_mesh(device.type, (size(),)),
        "reshard_after_forward": True,
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        "ignored_params": _keep_out(model, device),
    }
    config: Any = getattr(model, "config", None)
    architectures = getattr(config, "architectures", None)
    for module in [*layers, model] if shard_root else layers:
        fully_shard(module, **settings)
    if config is not None:
        # The class of a wrapped model has another name, which must not reach a checkpoint.
        config.architectures = architectures
    return layers


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a Hugging Face causal LM, or of a VLM's language part.

    Raises:
        RuntimeError: None are found.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if decoder is not None:
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            layers = _list_as_long_as_the_config_says(decoder)
        if layers:
            return list(layers)
    raise RuntimeError(
        "fsdp2_wrap needs the decoder layers of a causal LM; found none in "
        f"{type(model).__name__}. It looks for get_decoder().layers, then for the decoder's one "
        "list of config.num_hidden_layers modules."
    )


def _list_as_long_as_the_config_says(decoder: nn.Module) -> nn.ModuleList | None:
    """Return the decoder's one child list of `num_hidden_layers` modules; some call it `h`."""
    config: Any = getattr(decoder, "config", None)
    if config is None:
        return None
    count = config.get_text_config(decoder=True).num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    matching = [child for child in lists if len(child) == count]
    return matching[0] if len(matching) == 1 else None


def _keep_out(model: nn.Module, device: torch.device) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 must ignore, moved to where they compute."""
    of_experts = _expert_parallel_parameters(model)
    rest = [parameter for parameter in model.parameters() if parameter not in of_experts]
    elements: Counter[torch.dtype] = Counter()
    for parameter in rest:
        elements[parameter.dtype] += parameter.numel()
    [(dominant, _)] = elements.most_common(1)
    others = {parameter for parameter in rest if parameter.dtype != dominant}
    for parameter in others | of_experts:
        # fully_shard moves only what it manages. A model on the meta device is yet to be placed.
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    if others and is_master():
        warnings.warn(
            f"fsdp2_wrap keeps {len(others)} parameters whole on every rank: they are not of the "
            f"model's dominant dtype, {dominant}, and FSDP2 takes one dtype per group.",
            stacklevel=3,
        )
    return others | of_experts


def _expert_parallel_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of sharded experts, which are other ones on every rank."""
    parameters: set[nn.Parameter] = set()
    for module in model.modules():
        state: Any = getattr(module, "_parallel_state", None)
        if state is not None and state.expert_model_parallel_group.is_initialized():
            parameters.update(module.parameters())
    return parameters


def _compute_device() -> torch.device:
    """Return the device that the run's ranks compute on: NCCL serves GPU ranks, gloo CPU ranks."""
    if "cuda:nccl" in torch.distributed.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
