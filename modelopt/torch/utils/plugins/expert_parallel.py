# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of a Hugging Face MoE: what a plan with `ep_size` > 1 means.

1. The mesh and the shares: `expert_parallel_mesh`, `local_experts`, `routed_experts`, ...
2. Keeping a share: `shard_experts`, `install_expert_parallel_forwards`
3. A sharded forward: every token goes to the ranks that own its experts and comes back combined

**Routed experts** are the modules that hold the weights of all experts stacked, `down_proj` with
`gate_up_proj` or `up_proj` (first dimension `num_experts`), and are called as
`forward(hidden_states, top_k_index, top_k_weights)`, as transformers 5 stores them.

The one rule: *every rank of an expert-parallel group runs the same experts in the same order*, on a
batch of its own shape, also where no token is its own. No gradients flow through the exchange: it
serves calibration, under `torch.no_grad()`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from modelopt.torch.utils.distributed import ParallelState, is_dtensor_sharded, is_initialized, size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelopt.torch.utils.distributed import DistributionPlan

__all__ = [
    "expert_parallel_mesh",
    "install_expert_parallel_forwards",
    "local_experts",
    "routed_experts",
    "shard_experts",
    "stacked_tensors",
]

# An instance attribute: it outlives a `__class__` swap and stays out of `state_dict()`.
_TOTAL_ATTRIBUTE = "_num_experts_of_all_ranks"


# ----------------------------------------------------------------------- 1. The mesh and the shares


def expert_parallel_mesh(plan: DistributionPlan, device_type: str) -> DeviceMesh:
    """Return the mesh of shape `(edp, ep)`; every rank of the run must call this.

    The ranks of `mesh["ep"]`, which is the `ep_mesh` of the functions here, share a set of experts
    out; those of `mesh["edp"]` hold the same ones.

    Raises:
        ValueError: The plan is for another number of ranks than are live.
    """
    live = size() if is_initialized() else 0
    if plan.world_size != live:
        raise ValueError(
            f"world_size ({plan.world_size}) must be the number of live ranks ({live})"
        )
    shape = (plan.edp, plan.ep_size)
    return torch.distributed.init_device_mesh(device_type, shape, mesh_dim_names=("edp", "ep"))


def local_experts(num_experts: int, ep_mesh: DeviceMesh) -> range:
    """Return the global indices of this rank's experts out of `num_experts`.

    Raises:
        ValueError: The mesh's size does not divide `num_experts`.
    """
    degree, place = ep_mesh.size(), ep_mesh.get_local_rank()
    if num_experts % degree:
        raise ValueError(f"ep_size ({degree}) must divide the number of experts ({num_experts})")
    return range(num_experts)[place * num_experts // degree :][: num_experts // degree]


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routed experts of `model` by their qualified names, sharded or not.

    Raises:
        RuntimeError: There are none, or a module looks like experts that are stored otherwise.
    """
    found = {name: module for name, module in model.named_modules() if _is_routed(module)}
    parts = {part for module in found.values() for part in module.modules()}
    for name, module in model.named_modules():
        if _looks_routed(name, module) and parts.isdisjoint(module.modules()):
            raise RuntimeError(
                f"{type(module).__name__} ({name!r}) must hold stacked weights and be called with "
                "hidden_states, top_k_index and top_k_weights: plan it with ep_size=1"
            )
    if not found:
        raise RuntimeError(f"{type(model).__name__} has no routed experts: plan it with ep_size=1")
    return found


def _is_routed(module: nn.Module) -> bool:
    """Tell by the record of a sharded module, else by its weights and its forward's arguments."""
    if _TOTAL_ATTRIBUTE in vars(module):
        return True
    total, weights = getattr(module, "num_experts", None), dict(module.named_parameters("", False))
    stacks = [weights[n] for n in ("gate_up_proj", "up_proj", "down_proj") if n in weights]
    counts = {stack.shape[0] for stack in stacks if stack.dim() > 1}
    # Where a loader built this rank's share only, `total` is a multiple of what is stacked.
    if not isinstance(total, int) or len(stacks) < 2 or len(counts) != 1 or total % counts.pop():
        return False
    # Some experts take tokens that are sorted by expert already: self and one argument.
    arguments = inspect.signature(type(module).forward).parameters.values()
    return len(arguments) > 3 or any(a.kind is a.VAR_POSITIONAL for a in arguments)


def _looks_routed(name: str, module: nn.Module) -> bool:
    """Tell by name alone; shared experts are not routed, every rank keeps them."""
    kind = type(module).__name__
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    is_list = is_container and f".{name}".endswith(".experts")
    return is_list or ("Experts" in kind and "SharedExperts" not in kind)


def stacked_tensors(experts: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the weights, biases and scales of routed experts; each row is an expert."""
    own = [*experts.named_parameters("", False), *experts.named_buffers("", False)]
    count = dict(own)["down_proj"].shape[0]
    return {name: tensor for name, tensor in own if tensor.dim() and tensor.shape[0] == count}


# ------------------------------------------------------------------------------- 2. Keeping a share


def shard_experts(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Keep this rank's share of all routed experts, in place, and install the sharded forwards.

    Before `fsdp2_wrap`, which leaves them out; on the meta device too. Twice is the same as once.

    Raises:
        ValueError: The mesh's size does not divide a number of experts; nothing is cut then.
        RuntimeError: The model has no routed experts of this kind, or FSDP2 shards them.
    """
    _, shares = _shares(model, ep_mesh)
    for module, share, held in shares:
        if held == len(share) * ep_mesh.size():
            for tensor in stacked_tensors(module).values():
                # A copy, for a view would keep all experts in memory.
                tensor.data = tensor.data[share.start : share.stop].clone()
    install_expert_parallel_forwards(model, ep_mesh)


def install_expert_parallel_forwards(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Install the sharded forwards on experts of which this rank holds its share only.

    For a loader that read no more than the share (`num_experts` still counts all ranks'), and again
    where something may have dropped them; what is in place stays. They are hooks, which outlive a
    swap of a module's `__class__` or of an instance's `forward`: the module's own forward gets a
    row for each (token, expert) pair of this rank's experts, of which there may be none. Then
    `num_experts` is this rank's, and `_parallel_state` holds what quantizers synchronise over.

    Raises:
        ValueError: As `shard_experts`.
        RuntimeError: As `shard_experts`, or this rank holds another number than its share.
    """
    state, shares = _shares(model, ep_mesh)
    for module, share, held in shares:
        if held != len(share):
            raise RuntimeError(
                f"{type(module).__name__} must hold this rank's {len(share)} experts; it holds "
                f"{held}. Call shard_experts() with this mesh, once."
            )
    for module, share, _ in shares:
        vars(module).setdefault(_TOTAL_ATTRIBUTE, module.num_experts)
        module.num_experts, module._parallel_state, module._rows_seen = len(share), state, 0
        if _dispatch not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_dispatch, with_kwargs=True)
        if _combine not in module._forward_hooks.values():
            # Before the hooks of others, which are to see what the whole model would give.
            module.register_forward_hook(_combine, prepend=True)


def _shares(model: nn.Module, ep_mesh: DeviceMesh) -> tuple[Any, list[tuple[Any, range, int]]]:
    """Return the groups and all routed experts, each with its share's indices and what it holds."""
    state, shares = _parallel_state(ep_mesh), []
    module: Any
    for module in routed_experts(model).values():
        if is_dtensor_sharded(module):
            raise RuntimeError("FSDP2 shards the experts; call shard_experts() before fsdp2_wrap()")
        total = vars(module).get(_TOTAL_ATTRIBUTE)
        # Sharded ones are not counted by their weights, which a quantizer may keep otherwise.
        held = module.down_proj.shape[0] if total is None else module.num_experts
        shares.append((module, local_experts(total or module.num_experts, ep_mesh), held))
    return state, shares


def _parallel_state(ep_mesh: DeviceMesh) -> ParallelState:
    """Return the groups of sharded experts: who holds the same ones, and who holds the others."""
    # No public API leads from a part of a mesh to the whole; older torch has it elsewhere.
    of_part: Any = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
    root: Any = getattr(ep_mesh, "_get_root_mesh", lambda: of_part.get_root_mesh(ep_mesh))()
    edp_mesh = root["edp"] if "edp" in (root.mesh_dim_names or ()) else None
    if ep_mesh.shape != (size(),) if edp_mesh is None else ep_mesh.mesh_dim_names != ("ep",):
        raise ValueError(f"ep_mesh must be expert_parallel_mesh(...)['ep']; got {ep_mesh}")
    edp_group = -1 if edp_mesh is None or edp_mesh.size() == 1 else edp_mesh.get_group()
    return ParallelState(edp_group, expert_model_parallel_group=ep_mesh.get_group())


# ----------------------------------------------------------------------------- 3. A sharded forward


def _dispatch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send every token to the ranks that own its experts, once to each; a forward pre-hook."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    tokens, index, weights = *args, *(kwargs[name] for name in names[len(args) :])
    group = module._parallel_state.expert_model_parallel_group
    ranks, held = group.world_size(), module.num_experts
    # (ranks, tokens): whether the rank owns experts of the token. Rows travel in this order.
    goes = torch.stack([(index // held == rank).any(dim=1) for rank in range(ranks)])
    sent = goes.sum(dim=1, keepdim=True)
    received = _exchange(sent, [1] * ranks, [1] * ranks, group)
    counts = sent.flatten().tolist(), received.flatten().tolist()
    rows = (x.expand(ranks, *x.shape)[goes] for x in (tokens, index, weights))
    tokens, index, weights = (_exchange(x, *counts, group) for x in rows)
    index = index - group.rank() * held
    # (rows, top k): pairs of a peer's expert are left out, for every row counts in a calibration.
    mine = (index >= 0) & (index < held)
    module._rows_seen += sum(counts[1])
    module._expert_parallel_trip = goes, mine, counts
    return (tokens[mine.nonzero()[:, 0]], index[mine][:, None], weights[mine][:, None]), {}


def _combine(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Send every token's sum back to its rank; a forward hook. The order of the sums is fixed."""
    goes, mine, (sent, received) = vars(module).pop("_expert_parallel_trip")
    by_slot = output.new_zeros(*mine.shape, output.shape[1])
    by_slot[mine] = output
    group = module._parallel_state.expert_model_parallel_group
    by_rank = output.new_zeros(*goes.shape, output.shape[1])
    by_rank[goes] = _exchange(by_slot.sum(dim=1), received, sent, group)
    return by_rank.sum(dim=0)


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Send each rank of the group its number of rows, in rank order; return the rows received.

    Every rank of the group must call this, with rows of one width and dtype; numbers may be zero.
    The rows travel as bytes, for gloo does not carry every dtype (fp8, int16).
    """
    data = rows.contiguous().view(torch.uint8)
    buffer = data.new_empty(sum(received), data.shape[1])
    torch.distributed.all_to_all_single(buffer, data, received, sent, group=group.group)
    return buffer.view(rows.dtype)
