# SPDX-License-Identifier: Apache-2.0
"""The plan recorded on a model."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed
from _test_utils.torch.distributed.utils import DistributedWorkerPool
from torch import nn

from modelopt.torch.utils.distributed import (
    DistributionPlan,
    distribution_plan,
    is_dtensor_sharded,
    is_fsdp2_model,
    set_distribution_plan,
)

PLAN = DistributionPlan(world_size=2, dense="fsdp")


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_plan_tells_its_degrees() -> None:
    plan = DistributionPlan(world_size=8, ep_size=4, dense="fsdp")
    assert (plan.edp, plan.is_expert_parallel, plan.is_fsdp_dense) == (2, True, True)
    default = DistributionPlan()
    assert dataclasses.astuple(default) == (1, 1, "replicate")
    assert (default.edp, default.is_expert_parallel, default.is_fsdp_dense) == (1, False, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.ep_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"world_size": 0}, r"world_size .* 0"),
        ({"world_size": -2}, r"world_size .* -2"),
        ({"world_size": 4, "ep_size": 0}, r"ep_size .* 0"),
        ({"world_size": 2.0}, r"world_size .* 2\.0"),
        ({"world_size": "2"}, r"world_size .* '2'"),
        ({"world_size": True}, r"world_size .* True"),
        ({"world_size": 2, "ep_size": None}, r"ep_size .* None"),
        ({"world_size": 8, "ep_size": 3}, r"ep_size \(3\) must divide world_size \(8\)"),
        ({"world_size": 2, "ep_size": 4}, r"ep_size \(4\) must divide world_size \(2\)"),
        ({"dense": "ddp"}, r"dense .* 'ddp'"),
    ],
)
def test_plan_refuses_what_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DistributionPlan(**fields)


def test_plan_is_read_off_every_submodule() -> None:
    model = _model()
    set_distribution_plan(model, PLAN)
    assert all(distribution_plan(module) is PLAN for module in model.modules())


@pytest.mark.parametrize(("recorded", "named"), [("", "model itself"), ("1.0", "'1.0'")])
def test_second_record_is_refused_and_writes_nothing(recorded: str, named: str) -> None:
    model = _model()
    holder = model.get_submodule(recorded)
    set_distribution_plan(holder, PLAN)
    before = {name: "distribution_plan" in str(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(RuntimeError, match=named):
        set_distribution_plan(model, PLAN)
    after = {name: "distribution_plan" in str(vars(m)) for name, m in model.named_modules()}
    assert before == after
    assert distribution_plan(holder) is PLAN


def test_module_that_sits_in_the_tree_twice_is_one() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared))
    set_distribution_plan(model, PLAN)
    assert distribution_plan(shared) is PLAN


def test_record_needs_a_plan() -> None:
    with pytest.raises(TypeError, match="DistributionPlan; got 'fsdp'"):
        set_distribution_plan(_model(), "fsdp")  # type: ignore[arg-type]


def test_record_survives_copies_and_class_swaps_and_stays_out_of_the_state() -> None:
    model = _model()
    keys = set(model.state_dict())
    set_distribution_plan(model, PLAN)
    assert set(model.state_dict()) == keys
    duplicate = copy.deepcopy(model)
    assert all(distribution_plan(module) == PLAN for module in duplicate.modules())
    model[0].__class__ = type("QuantLinear", (nn.Linear,), {})
    assert distribution_plan(model[0]) is PLAN


def test_model_of_a_single_process_has_the_default_plan() -> None:
    assert distribution_plan(_model()) == DistributionPlan()


def _plan_of_a_run(rank: int, size: int) -> None:
    model = _model()
    with pytest.raises(RuntimeError, match=r"no distribution plan.*2 ranks.*added"):
        distribution_plan(model)
    set_distribution_plan(model, PLAN)
    assert distribution_plan(model) is PLAN
    model.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="read the plan off the model it was added to"):
        distribution_plan(model[2])


def test_model_of_a_run_must_record_its_plan(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_plan_of_a_run)


def _sharded_alone(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    wrapped, planned = _model(), _model()
    set_distribution_plan(planned, PLAN)
    for model in (wrapped, planned):
        assert not is_fsdp2_model(model)
        fully_shard(model[1], mesh=mesh)
        assert is_fsdp2_model(model)
    assert not is_fsdp2_model(wrapped[0])
    assert all(distribution_plan(module) is PLAN for module in planned.modules())
    # A part of a sharded model holds DTensors only.
    buffered = nn.ReLU()
    buffered.register_buffer("table", distribute_tensor(torch.ones(4), mesh))
    # And a wrapped part may hold none.
    without_parameters = nn.ReLU()
    fully_shard(without_parameters, mesh=mesh)
    for part in (wrapped, wrapped.get_submodule("1.0"), buffered, without_parameters):
        assert is_dtensor_sharded(part) == (part is not without_parameters)
        with pytest.raises(RuntimeError, match="it is sharded"):
            distribution_plan(part)
    assert not is_dtensor_sharded(wrapped[0])
    assert distribution_plan(wrapped[0]) == DistributionPlan()


def test_sharded_model_must_record_its_plan(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_sharded_alone)
