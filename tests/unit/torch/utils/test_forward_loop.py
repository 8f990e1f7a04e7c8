# SPDX-License-Identifier: Apache-2.0
"""`distributed_forward_loop`: what `mtq.quantize` runs to calibrate."""

import dataclasses
import functools
from collections import UserDict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _test_utils.torch.distributed.ranks import Outcome, bounded_outcome
from _test_utils.torch.distributed.utils import DistributedWorkerPool
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from modelopt.torch.utils.distributed import (
    DistributionPlan,
    distributed_forward_loop,
    set_distribution_plan,
    shard_dataloader,
)

Pair = namedtuple("Pair", ["a", "b"])


class _Recorder(nn.Module):
    """Records the calls it gets, whether gradients were on, and `config.use_cache` then."""

    def __init__(self, config: Any = None, fails: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        if config is not None:
            self.config = config
        self.fails = fails
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.requires_grad_seen: list[bool] = []
        self.use_cache_seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        config: Any = getattr(self, "config", None)
        self.use_cache_seen.append(getattr(config, "use_cache", "absent"))
        if hasattr(config, "text_config"):
            self.use_cache_seen.append(config.text_config.use_cache)
        output = self.scale * 2
        self.requires_grad_seen.append(output.requires_grad)
        if self.fails:
            raise ValueError("forward failed")
        return output


def _loader(batches: list[Any]) -> Any:
    """Return a loader that hands the batches out as they are."""
    dataset: Any = batches
    return DataLoader(dataset, batch_size=None, collate_fn=lambda batch: batch)


def test_batches_become_arguments_by_their_kind() -> None:
    model = _Recorder()
    x, y = torch.ones(1), torch.zeros(1)
    batches = [{"x": x}, UserDict(x=x), (x, y), [x, y], Pair(x, y), x]
    distributed_forward_loop(model, _loader(batches))(None)
    assert model.calls == [
        ((), {"x": x}),
        ((), {"x": x}),
        ((x, y), {}),
        ((x, y), {}),
        ((x, y), {}),
        ((x,), {}),
    ]
    assert model.requires_grad_seen == [False] * 6


def test_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="rank 0 got str"):
        distributed_forward_loop(_Recorder(), _loader(["text"]))()


def test_loop_runs_the_captured_model_by_calling_it() -> None:
    model, handed = _Recorder(), _Recorder()
    hooked: list[int] = []
    model.register_forward_hook(lambda *_: hooked.append(1))
    loop = distributed_forward_loop(model, _loader([torch.ones(1)] * 3))
    loop(handed)
    loop()
    assert len(hooked) == len(model.calls) == 6
    assert not handed.calls


def test_batches_move_to_the_device_however_they_are_nested() -> None:
    model = _Recorder()
    x = torch.ones(2)
    batch = {"x": x, "nested": [x, (x, {"y": x}), Pair(x, 3)], "text": "kept"}
    distributed_forward_loop(model, _loader([batch]), device="meta")()
    moved = model.calls[0][1]
    _, (_, inner), pair = moved["nested"]
    for tensor in (moved["x"], moved["nested"][0], inner["y"], pair.a):
        assert tensor.device.type == "meta"
    assert (moved["text"], pair.b, type(pair)) == ("kept", 3, Pair)
    assert x.device.type == "cpu"
    model.calls.clear()
    distributed_forward_loop(model, _loader([batch]))()
    assert model.calls[0][1]["x"].device.type == "cpu"


class _PropertyConfig:
    use_cache = property(lambda _: True)


@dataclasses.dataclass(frozen=True)
class _FrozenConfig:
    use_cache: bool = True


class _ClassConfig:
    use_cache = True


def _nested() -> SimpleNamespace:
    return SimpleNamespace(text_config=SimpleNamespace(use_cache=True))


CONFIGS: dict[str, Any] = {
    "true": lambda: SimpleNamespace(use_cache=True),
    "false": lambda: SimpleNamespace(use_cache=False),
    "none": lambda: SimpleNamespace(use_cache=None),
    "absent": SimpleNamespace,
    "nested": _nested,
    "property": _PropertyConfig,
    "frozen": _FrozenConfig,
    "of the class": _ClassConfig,
    "llama": LlamaConfig,
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_use_cache_is_off_inside_and_as_before_after(name: str, fails: bool) -> None:
    config = CONFIGS[name]()
    before, kind = dict(vars(config)), type(config)
    nested_before = dict(vars(config.text_config)) if name == "nested" else None
    reads_before = getattr(config, "use_cache", "absent")
    model = _Recorder(config, fails)
    loop = distributed_forward_loop(model, _loader([torch.ones(1)]))
    if fails:
        with pytest.raises(ValueError, match="forward failed"):
            loop()
    else:
        loop()
    assert model.use_cache_seen == [False] * (2 if name == "nested" else 1)
    assert vars(config) == before
    assert type(config) is kind
    assert getattr(config, "use_cache", "absent") == reads_before
    if name == "nested":
        assert vars(config.text_config) == nested_before


def test_hugging_face_model_keeps_no_cache() -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = LlamaForCausalLM(config)
    caches: list[Any] = []
    model.register_forward_hook(lambda _m, _a, output: caches.append(output.past_key_values))
    batches = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}]
    distributed_forward_loop(model, _loader(batches))()
    assert caches == [None]
    assert model.config.use_cache is True


@pytest.mark.parametrize(
    ("plan", "mesh_size", "message"),
    [
        (DistributionPlan(2, ep_size=2), None, r"ep_size \(2\).*given none"),
        (DistributionPlan(4, ep_size=4), 2, r"ep_size \(4\).*of size 2"),
        (DistributionPlan(2), 2, "must be None"),
        (None, 2, "must be None"),
    ],
)
def test_mesh_must_be_the_plans(
    plan: DistributionPlan | None, mesh_size: int | None, message: str
) -> None:
    model = _Recorder()
    if plan is not None:
        set_distribution_plan(model, plan)
    mesh: Any = SimpleNamespace(size=lambda: mesh_size) if mesh_size else None
    with pytest.raises(ValueError, match=message):
        distributed_forward_loop(model, _loader([]), ep_mesh=mesh)


def _loop_without_a_plan(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="records no distribution plan"):
        distributed_forward_loop(_Recorder(), _loader([]))


def test_model_of_a_run_without_a_plan_is_refused(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_loop_without_a_plan)


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1)] * 2)


def _uneven(plan: DistributionPlan, is_stream: bool, rank: int, size: int) -> int:
    model = _Recorder()
    set_distribution_plan(model, plan)
    loader = DataLoader(_Stream()) if is_stream else _loader([torch.ones(1)] * (rank + 1))
    distributed_forward_loop(model, loader)()
    return len(model.calls)


def test_uneven_batches_fail_on_every_rank_where_forwards_communicate(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    case = functools.partial(_uneven, DistributionPlan(2, dense="fsdp"), False)
    for outcome in cpu_dist_workers.run(bounded_outcome, case):
        assert outcome.raised == "RuntimeError"
        assert "[1, 2]" in outcome.text


def _uneven_experts(rank: int, size: int) -> int:
    model = _Recorder()
    set_distribution_plan(model, DistributionPlan(2, ep_size=2))
    mesh: Any = SimpleNamespace(size=lambda: 2)
    loader = _loader([torch.ones(1)] * (rank + 1))
    distributed_forward_loop(model, loader, ep_mesh=mesh)()
    return len(model.calls)


def test_uneven_batches_fail_where_experts_are_sharded(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    for outcome in cpu_dist_workers.run(bounded_outcome, _uneven_experts):
        assert outcome.raised == "RuntimeError"


@pytest.mark.parametrize(
    ("plan", "is_stream", "forwards"),
    [
        (DistributionPlan(2), False, [1, 2]),
        (DistributionPlan(2, dense="fsdp"), True, [2, 2]),
    ],
)
def test_counts_are_free_in_a_replicated_model_and_unknown_of_a_stream(
    cpu_dist_workers: DistributedWorkerPool,
    plan: DistributionPlan,
    is_stream: bool,
    forwards: list[int],
) -> None:
    case = functools.partial(_uneven, plan, is_stream)
    outcomes = cpu_dist_workers.run(bounded_outcome, case)
    assert outcomes == [Outcome(None, count) for count in forwards]


def _progress(rank: int, size: int) -> str:
    import contextlib
    import io

    model = _Recorder()
    set_distribution_plan(model, DistributionPlan(size))
    loader = shard_dataloader(DataLoader(TensorDataset(torch.ones(6, 1))), rank, size)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        distributed_forward_loop(model, loader)()
    return stderr.getvalue()


def test_rank_0_shows_progress(cpu_dist_workers: DistributedWorkerPool) -> None:
    shown, hidden = cpu_dist_workers.run(_progress)
    assert "3/3" in shown
    assert hidden == ""
