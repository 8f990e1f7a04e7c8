# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on real Hugging Face models over real ranks, against the whole model."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import transformers
from _test_utils.torch.distributed.ranks import bounded_outcome
from _test_utils.torch.distributed.utils import DistributedWorkerPool
from torch import nn
from torch.utils.data import DataLoader
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from modelopt.torch.utils.distributed import (
    DistributedProcessGroup,
    DistributionPlan,
    distributed_forward_loop,
    is_dtensor_sharded,
    set_distribution_plan,
)
from modelopt.torch.utils.plugins import expert_parallel
from modelopt.torch.utils.plugins.expert_parallel import (
    expert_parallel_mesh,
    install_expert_parallel_forwards,
    local_experts,
    routed_experts,
    shard_experts,
    stacked_tensors,
)
from modelopt.torch.utils.plugins.model_load_utils import fsdp2_wrap

NUM_EXPERTS = 8
HIDDEN = 32
# With the default range of 0.02 experts give so little that a wrong one would pass for right.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def _qwen3_moe(**settings: Any) -> nn.Module:
    sizes: dict[str, Any] = {
        **SIZES,
        "moe_intermediate_size": 16,
        "num_experts": NUM_EXPERTS,
        **settings,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS)
    return transformers.MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3_moe": _qwen3_moe, "mixtral": _mixtral}


def _built(name: str, implementation: str = "grouped_mm") -> tuple[Any, Any]:
    """Return the whole model, the same on every rank, and a copy to shard."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    model.set_experts_implementation(implementation)
    whole = copy.deepcopy(model)
    assert whole.config._experts_implementation == implementation
    return whole, model


def _batch(rank: int) -> torch.Tensor:
    """Return token ids of a shape of the rank's own."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 64, (1 + rank % 3, 5 + 2 * rank), generator=generator)


def _assert_same_logits(whole: Any, model: Any, rank: int) -> None:
    with torch.no_grad():
        expected = whole(input_ids=_batch(rank)).logits
        torch.testing.assert_close(
            model(input_ids=_batch(rank)).logits, expected, atol=1e-5, rtol=0
        )


def _mesh(size: int, ep_size: int = 2) -> Any:
    return expert_parallel_mesh(DistributionPlan(size, ep_size=ep_size), "cpu")["ep"]


# ------------------------------------------------------------------------ The whole model's logits


def _sharded_logits(name: str, implementation: str, rank: int, size: int) -> None:
    whole, model = _built(name, implementation)
    shard_experts(model, _mesh(size))
    experts = routed_experts(model)
    assert list(experts) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    share = slice(rank * 4, rank * 4 + 4)
    module: Any
    for path, module in experts.items():
        assert module.num_experts == 4
        for stack, parameter in module.named_parameters():
            everyones = whole.get_parameter(f"{path}.{stack}")
            assert torch.equal(parameter, everyones[share])
            assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    _assert_same_logits(whole, model, rank)
    # Also with gradients on, which do not flow through the exchange.
    logits = model(input_ids=_batch(rank)).logits
    torch.testing.assert_close(logits, whole(input_ids=_batch(rank)).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_whole_models(
    cpu_dist_workers: DistributedWorkerPool, name: str, implementation: str
) -> None:
    cpu_dist_workers.run(functools.partial(_sharded_logits, name, implementation))


def _ranks_of(group: DistributedProcessGroup) -> list[int]:
    ranks: list[int] = torch.distributed.get_process_group_ranks(group.group)
    return ranks


def _four_ranks(ep_size: int, rank: int, size: int) -> None:
    mesh, halves = _mesh(size, ep_size), _mesh(size)
    for name in MODELS:
        whole, model = _built(name)
        shard_experts(model, mesh)
        _assert_same_logits(whole, model, rank)
        module: Any
        for module in routed_experts(model).values():
            assert module.num_experts == NUM_EXPERTS // ep_size
            state = module._parallel_state
            first = rank - rank % ep_size
            expected = list(range(first, first + ep_size))
            assert _ranks_of(state.expert_model_parallel_group) == expected
            assert not state.tensor_parallel_group.is_initialized()
            if ep_size == size:
                assert state.data_parallel_group.group == -1
                # Experts that are shared out over one mesh are not cut again over another.
                with pytest.raises(RuntimeError, match="rank's 4 experts; it holds 2"):
                    shard_experts(module, halves)
                assert len(module.down_proj) == 2
            else:
                assert _ranks_of(state.data_parallel_group) == [rank % 2, rank % 2 + 2]


@pytest.mark.slow
@pytest.mark.xdist_group("four_ranks")
@pytest.mark.parametrize("ep_size", [2, 4])
def test_four_ranks_share_experts_out_in_one_set_or_in_two(
    four_ranks: DistributedWorkerPool, ep_size: int
) -> None:
    four_ranks.run(functools.partial(_four_ranks, ep_size))


def _dense_fsdp(rank: int, size: int) -> None:
    whole, model = _built("qwen3_moe")
    shard_experts(model, _mesh(size))
    of_experts = {p for m in routed_experts(model).values() for p in m.parameters()}
    fsdp2_wrap(model)
    for parameter in model.parameters():
        is_sharded = hasattr(parameter, "full_tensor")
        assert is_sharded != (parameter in of_experts)
    assert len(of_experts) == 4
    for _ in range(2):
        _assert_same_logits(whole, model, rank)


def test_dense_part_may_be_fsdp2_sharded(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_dense_fsdp)


def _wide_experts(rank: int, size: int) -> None:
    # Most elements are of the experts, which must not decide what FSDP2 takes of the rest.
    _, model = _built("qwen3_moe")
    model.to(torch.bfloat16)
    shard_experts(model, _mesh(size))
    for module in routed_experts(model).values():
        for parameter in module.parameters():
            parameter.data = parameter.data.repeat(64, 1, 1).float()
    fsdp2_wrap(model)
    assert is_dtensor_sharded(model.model.layers[0].self_attn)
    assert not is_dtensor_sharded(model.model.layers[0].mlp.experts)


def test_dtype_of_sharded_experts_is_not_the_models(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_wide_experts)


# ------------------------------------------------------------------------------- The experts alone


# Transposed weights with biases; no gate; what the others have.
EXPERTS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "gpt_oss": (
        GptOssExperts,
        transformers.GptOssConfig,
        {"intermediate_size": 16, "num_local_experts": NUM_EXPERTS},
    ),
    "nemotron_h": (
        NemotronHExperts,
        transformers.NemotronHConfig,
        {"moe_intermediate_size": 16, "n_routed_experts": NUM_EXPERTS},
    ),
    "qwen3_moe": (
        Qwen3MoeExperts,
        transformers.Qwen3MoeConfig,
        {"moe_intermediate_size": 16, "num_experts": NUM_EXPERTS},
    ),
}


def _whole_experts(kind: str, implementation: str) -> Any:
    torch.manual_seed(0)
    build, build_config, sizes = EXPERTS[kind]
    config = build_config(hidden_size=HIDDEN, **sizes)
    config._experts_implementation = implementation
    experts = build(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts.requires_grad_(False)


# The experts of each token, for the ranks of a world of two; rank 0 owns 0 to 3.
ROUTINGS: dict[str, list[list[list[int]]]] = {
    "to both": [[[0, 5], [7, 2], [1, 3]], [[4, 6]]],
    "to the own rank only": [[[0, 1], [3, 2]], [[4, 5], [7, 6], [5, 6]]],
    "to the other rank only": [[[4, 6], [7, 5]], [[0, 3]]],
    "to rank 0 only": [[[0, 1], [3, 2]], [[1, 0], [2, 0], [1, 3]]],
    "to rank 1 only": [[[7, 5]], [[4, 6], [6, 5]]],
    "of no token on rank 1": [[[0, 4], [1, 2]], []],
    "of no token on any rank": [[], []],
    # What a router gives to a masked token; the whole model's experts pass it by.
    "to one expert past the last": [[[1, 8], [8, 8]], [[8, 4]]],
}


def _routed_rows(kind: str, implementation: str, rank: int, size: int) -> None:
    for routing, indices in ROUTINGS.items():
        takes_past_the_last = (kind, implementation) == ("qwen3_moe", "eager")
        if "past the last" in routing and not takes_past_the_last:
            continue
        whole = _whole_experts(kind, implementation)
        module = copy.deepcopy(whole)
        shard_experts(module, _mesh(size))
        seen: list[tuple[Any, ...]] = []
        module.forward = functools.partial(_recording, module, seen)
        index = torch.tensor(indices[rank], dtype=torch.long).reshape(-1, 2)
        torch.manual_seed(rank)
        hidden, weights = torch.randn(len(index), HIDDEN), torch.rand(index.shape)
        given = hidden.clone(), index.clone(), weights.clone()
        output = module(hidden, index, top_k_weights=weights)
        # The whole experts may not take an empty batch.
        expected = whole(hidden, index, weights) if len(index) else hidden
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0, msg=routing)
        assert all(torch.equal(a, b) for a, b in zip(given, (hidden, index, weights), strict=True))
        # Its own forward got each pair of its experts once, and no other row.
        [(rows, local, row_weights)] = seen
        pairs = [e - 4 * rank for tokens in indices for token in tokens for e in token]
        assert local.shape == row_weights.shape == (len(rows), 1)
        assert sorted(local.flatten().tolist()) == sorted(e for e in pairs if 0 <= e < 4)


def _recording(module: Any, seen: list[tuple[Any, ...]], *args: Any) -> torch.Tensor:
    seen.append(args)
    output: torch.Tensor = type(module).forward(module, *args)
    return output


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", EXPERTS)
def test_each_token_is_computed_where_its_experts_are(
    cpu_dist_workers: DistributedWorkerPool, kind: str, implementation: str
) -> None:
    cpu_dist_workers.run(functools.partial(_routed_rows, kind, implementation))


def _low_precision(weights_dtype: torch.dtype, rank: int, size: int) -> None:
    for implementation in IMPLEMENTATIONS:
        whole = _whole_experts("qwen3_moe", implementation).to(torch.bfloat16)
        module = copy.deepcopy(whole)
        shard_experts(module, _mesh(size))
        torch.manual_seed(rank)
        hidden = torch.randn(6, HIDDEN, dtype=torch.bfloat16)
        weights = torch.rand(6, 2).to(weights_dtype)
        index = torch.rand(6, NUM_EXPERTS).topk(2).indices
        output = module(hidden, index, weights)
        torch.testing.assert_close(output, whole(hidden, index, weights), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_output_has_the_dtype_of_the_tokens(
    cpu_dist_workers: DistributedWorkerPool, weights_dtype: torch.dtype
) -> None:
    cpu_dist_workers.run(functools.partial(_low_precision, weights_dtype))


def _travel(dtype: torch.dtype, rank: int, size: int) -> None:
    group = DistributedProcessGroup()
    # Row i of what rank r sends to rank p is 16 r + 4 p + i; rank 0 sends itself nothing.
    counts = [[0, 3], [2, 1]]

    def rows(src: int, dst: int) -> list[list[int]]:
        return [[16 * src + 4 * dst + i] * 3 for i in range(counts[src][dst])]

    sent = torch.tensor([*rows(rank, 0), *rows(rank, 1)]).to(dtype)
    received = torch.tensor([*rows(0, rank), *rows(1, rank)]).to(dtype)
    got = expert_parallel._exchange(sent, counts[rank], [c[rank] for c in counts], group)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), received.view(torch.uint8))
    # Nothing either way, and rows that are not contiguous.
    assert expert_parallel._exchange(sent[:0], [0, 0], [0, 0], group).shape == (0, 3)
    across = torch.tensor([[rank, 2], [3, 4]]).to(dtype).T
    got = expert_parallel._exchange(across, [1, 1], [1, 1], group).float()
    assert got.tolist() == ([[0, 3], [1, 3]] if rank == 0 else [[2, 4], [2, 4]])


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.bfloat16, torch.float32]
)
def test_rows_of_any_dtype_travel(
    cpu_dist_workers: DistributedWorkerPool, dtype: torch.dtype
) -> None:
    cpu_dist_workers.run(functools.partial(_travel, dtype))


# --------------------------------------------------------------------- Installing, and again after


@functools.cache
def _quantized(base: Any) -> type[nn.Module]:
    """Return a generated subclass, one for each base, as quantizer insertion makes them."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return base.forward(self, *args, **kwargs)

    return type(f"Quant{base.__name__}", (base,), {"forward": forward})


def _instance_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.instance_calls = getattr(self, "instance_calls", 0) + 1
    return type(self).forward(self, *args, **kwargs)


def _swapped(implementation: str, rank: int, size: int) -> None:
    whole, model = _built("qwen3_moe", implementation)
    mesh = _mesh(size)
    outputs: list[torch.Tensor] = []
    modules: list[Any] = list(routed_experts(model).values())
    modules[0].register_forward_hook(lambda _m, _a, output: outputs.append(output))
    shard_experts(model, mesh)
    for module in modules:
        kind: Any = type(module)
        module.__class__ = _quantized(kind)
        module.forward = types.MethodType(_instance_forward, module)
    _assert_same_logits(whole, model, rank)
    for _ in range(2):
        install_expert_parallel_forwards(model, mesh)
        shard_experts(model, mesh)
    _assert_same_logits(whole, model, rank)
    for module in modules:
        assert module.calls == module.instance_calls == 2
        assert module.num_experts == len(module.down_proj) == 4
        assert len(module._forward_pre_hooks) == 1
        # A quantizer may keep the weights in another way, and drop the forwards and the groups.
        weights = module.down_proj.data
        del module.forward, module._parallel_state, module.down_proj
        module.register_buffer("down_proj", weights)
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    install_expert_parallel_forwards(model, mesh)
    _assert_same_logits(whole, model, rank)
    assert [module.calls for module in modules] == [3, 3]
    # A hook that was there before sees the sum of all experts, for each token of this rank.
    assert [len(output) for output in outputs] == [_batch(rank).numel()] * 2
    assert list(routed_experts(model).values()) == modules


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forwards_survive_a_quantizer_and_install_again(
    cpu_dist_workers: DistributedWorkerPool, implementation: str
) -> None:
    cpu_dist_workers.run(functools.partial(_swapped, implementation))


def _only_the_share(rank: int, size: int) -> None:
    whole, model = _built("mixtral")
    mesh = _mesh(size)
    share = local_experts(NUM_EXPERTS, mesh)
    assert share == range(4 * rank, 4 * rank + 4)
    with pytest.raises(RuntimeError, match="must hold this rank's 4 experts; it holds 8"):
        install_expert_parallel_forwards(model, mesh)
    _assert_same_logits(whole, model, 3)
    for module in routed_experts(model).values():
        for name, tensor in stacked_tensors(module).items():
            setattr(module, name, nn.Parameter(tensor[share.start : share.stop].clone()))
    install_expert_parallel_forwards(model, mesh)
    _assert_same_logits(whole, model, rank)
    for mesh_again in (_mesh(size), _mesh(size)):
        shard_experts(model, mesh_again)
        _assert_same_logits(whole, model, rank)


def test_loader_may_read_its_share_only(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_only_the_share)


def _on_meta(rank: int, size: int) -> None:
    with torch.device("meta"):
        model: Any = _qwen3_moe().eval()
    mesh = _mesh(size)
    shard_experts(model, mesh)
    assert {p.shape[0] for m in routed_experts(model).values() for p in m.parameters()} == {4}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_model_on_the_meta_device_is_sharded(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_on_meta)


def _copied(rank: int, size: int) -> None:
    whole, model = _built("qwen3_moe")
    shard_experts(model, _mesh(size))
    model = copy.deepcopy(model)
    _assert_same_logits(whole, model, rank)
    assert not [name for name in model.state_dict() if name not in whole.state_dict()]


def test_sharded_model_copies(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_copied)


def _looped(rank: int, size: int) -> None:
    whole, model = _built("qwen3_moe")
    plan = DistributionPlan(size, ep_size=2)
    mesh = expert_parallel_mesh(plan, "cpu")
    assert mesh.mesh_dim_names == ("edp", "ep")
    shard_experts(model, mesh["ep"])
    set_distribution_plan(model, plan)
    batches: Any = [{"input_ids": _batch(rank)}, {"input_ids": _batch(rank + 2)}]
    loop = distributed_forward_loop(model, DataLoader(batches, batch_size=None), None, mesh["ep"])
    # Quantizer insertion comes between making the loop and running it.
    module: Any
    for module in routed_experts(model).values():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    logits: list[torch.Tensor] = []
    model.register_forward_hook(lambda _m, _a, output: logits.append(output.logits))
    loop(model)
    assert len(logits) == 2
    with torch.no_grad():
        for batch, got in zip(batches, logits, strict=True):
            torch.testing.assert_close(got, whole(**batch).logits, atol=1e-5, rtol=0)


def test_forward_loop_installs_the_forwards_again(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_looped)


class _Collecting(nn.Module):
    """A quantizer that collects, as far as the loop looks at it."""

    _if_calib = True


def _routed_to(change: Callable[[torch.Tensor], torch.Tensor], _module: Any, args: Any) -> Any:
    hidden, index, weights = args
    return hidden, change(index), weights


def _starved(rank: int, size: int) -> None:
    _, model = _built("qwen3_moe")
    plan = DistributionPlan(size, ep_size=2)
    mesh = expert_parallel_mesh(plan, "cpu")["ep"]
    shard_experts(model, mesh)
    set_distribution_plan(model, plan)
    batches: Any = [{"input_ids": _batch(rank)}] * 2
    loop = distributed_forward_loop(model, DataLoader(batches, batch_size=None), None, mesh)
    [first, second] = routed_experts(model).values()
    second.add_module("input_quantizer", _Collecting())
    loop()
    # From here on rank 1 gets no token, which hurts only where a quantizer waits for one.
    to_rank_0 = functools.partial(_routed_to, lambda index: index % 4)
    first.register_forward_pre_hook(to_rank_0, prepend=True)
    loop()
    hook = second.register_forward_pre_hook(to_rank_0, prepend=True)
    outcome = bounded_outcome(rank, size, lambda *_: loop())
    assert outcome.raised == "RuntimeError"
    assert "none came to 'model.layers.1.mlp.experts' of rank 1. " in outcome.text
    # No rank misses what none got.
    hook.remove()
    to_no_rank = functools.partial(_routed_to, lambda index: torch.full_like(index, NUM_EXPERTS))
    second.register_forward_pre_hook(to_no_rank, prepend=True)
    loop()


def test_forward_loop_fails_on_every_rank_where_quantized_experts_saw_no_token(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_starved)


# ---------------------------------------------------------------------------------- What is refused


class _TokensOnlyExperts(nn.Module):
    """As Llama 4 has them: stacked, but given tokens that are sorted by expert."""

    def __init__(self, up: int = 4, down: int = 4, total: int | None = 4) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(up, 2, 2))
        self.down_proj = nn.Parameter(torch.zeros(down, 2, 2))
        if total is not None:
            self.num_experts = total

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _StackedExperts(_TokensOnlyExperts):
    def forward(
        self, hidden_states: Any, top_k_index: Any = None, top_k_weights: Any = None
    ) -> Any:
        return hidden_states, top_k_index, top_k_weights


class _WithoutDownExperts(_StackedExperts):
    def __init__(self) -> None:
        super().__init__()
        del self.down_proj


class _OldMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2)])


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "called otherwise": (_TokensOnlyExperts, "_TokensOnlyExperts"),
    "stacked unevenly": (functools.partial(_StackedExperts, 6), "_StackedExperts"),
    "not counted": (functools.partial(_StackedExperts, total=None), "_StackedExperts"),
    "counted otherwise": (functools.partial(_StackedExperts, total=6), "_StackedExperts"),
    "without down_proj": (_WithoutDownExperts, "_WithoutDownExperts"),
    "a list": (_OldMoe, "ModuleList"),
}


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_stored_otherwise_are_refused_by_name(name: str, known: int) -> None:
    build, kind = UNKNOWN[name]
    model = nn.ModuleDict({"known": _StackedExperts()} if known else {})
    model["unknown"] = build()
    with pytest.raises(RuntimeError, match=rf"{kind} \('unknown(\.experts)?'\) must hold"):
        routed_experts(model)


class _FooSharedExperts(nn.Module):
    pass


class _MoeWithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared_expert = _FooSharedExperts()
        self.shared_experts = nn.ModuleList([nn.Linear(2, 2)])
        self.experts = _StackedExperts()
        self.experts.act_fn_of_Experts = _FooSharedExperts()


def test_routed_experts_are_found_among_other_modules() -> None:
    model = nn.Sequential(_MoeWithExperts(), _StackedExperts(8, 8, 8))
    assert list(routed_experts(model)) == ["0.experts", "1"]
    alone = _StackedExperts()
    assert routed_experts(alone) == {"": alone}


def test_model_without_routed_experts_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Sequential has no routed experts"):
        routed_experts(nn.Sequential(nn.Linear(2, 2), _FooSharedExperts()))


def test_mesh_needs_the_ranks_of_the_plan() -> None:
    for plan in (DistributionPlan(), DistributionPlan(4, ep_size=2)):
        with pytest.raises(ValueError, match=rf"\({plan.world_size}\) must be .*ranks \(0\)"):
            expert_parallel_mesh(plan, "cpu")


def _refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"world_size \(4\) must be .*\(2\)"):
        expert_parallel_mesh(DistributionPlan(4, ep_size=2), "cpu")
    mesh = expert_parallel_mesh(DistributionPlan(size, ep_size=2), "cpu")
    # The last module is the odd one: the others must not be cut by then.
    model: Any = nn.Sequential(_StackedExperts(), _StackedExperts(5, 5, 5))
    with pytest.raises(ValueError, match=r"ep_size \(2\) must divide .* experts \(5\)"):
        shard_experts(model, mesh["ep"])
    assert [len(module.down_proj) for module in model] == [4, 5]
    for call in (shard_experts, install_expert_parallel_forwards):
        with pytest.raises(RuntimeError, match="no routed experts"):
            call(nn.Linear(2, 2), mesh["ep"])
    for wrong in (mesh, mesh["edp"], torch.distributed.init_device_mesh("cpu", (1, 2))):
        with pytest.raises(ValueError, match="ep_mesh must be expert_parallel_mesh"):
            shard_experts(_StackedExperts(), wrong)
    alone = torch.distributed.init_device_mesh("cpu", (2,))
    _, model = _built("qwen3_moe")
    shard_experts(model, alone)
    state: Any = next(iter(routed_experts(model).values()))._parallel_state
    assert state.data_parallel_group.group == -1
    _, model = _built("qwen3_moe")
    fsdp2_wrap(model)
    with pytest.raises(RuntimeError, match="before fsdp2_wrap"):
        shard_experts(model, mesh["ep"])


def test_what_cannot_be_sharded_is_refused_on_every_rank(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_refused)
