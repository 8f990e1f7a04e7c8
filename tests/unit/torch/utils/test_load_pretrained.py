# SPDX-License-Identifier: Apache-2.0
"""`load_pretrained` on real Hugging Face checkpoints over real ranks, against `from_pretrained`."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import transformers
from _test_utils.torch.distributed.ranks import Outcome, bounded_outcome
from _test_utils.torch.distributed.utils import DistributedWorkerPool, bounded_collectives
from torch.distributed.tensor import DTensor

from modelopt.torch.utils.distributed import (
    DistributionPlan,
    distributed_forward_loop,
    distribution_plan,
    is_fsdp2_model,
)
from modelopt.torch.utils.plugins import model_load_utils
from modelopt.torch.utils.plugins.expert_parallel import (
    expert_parallel_mesh,
    local_experts,
    routed_experts,
)
from modelopt.torch.utils.plugins.model_load_utils import load_pretrained

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # With the usual 0.02, logits hardly tell one model from another.
    "initializer_range": 0.15,
}
MOE: dict[str, Any] = {**SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**MOE, num_experts=4),
    "three_experts": lambda: transformers.Qwen3MoeConfig(**MOE, num_experts=3),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_experts_per_tok=2, num_local_experts=4
    ),
    # Its router stays in float32 in a bfloat16 model, and its first layer is dense.
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
}
# ep_size, dense
PLANS = [(1, "replicate"), (1, "fsdp"), (2, "replicate"), (2, "fsdp")]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a checkpoint as transformers does, once for each request."""

    @functools.cache
    def write(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(CONFIGS[name](), dtype=dtype)
        model.generation_config.max_new_tokens = 7
        model.save_pretrained(folder, **settings)
        return folder

    return write


def _whole_model(folder: Path) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder)


def _tokens(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 64, (2, 5 + 2 * rank), generator=generator)


def _assert_same_parameters(model: Any, whole: Any, ep_mesh: Any) -> None:
    experts = tuple(f"{name}." for name in (routed_experts(model) if ep_mesh else {}))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert list(parameters) == [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    for name, parameter in parameters.items():
        expected = whole.get_parameter(name)
        is_dtensor = isinstance(parameter, DTensor)
        assert parameter.dtype == expected.dtype, name
        if experts and name.startswith(experts):
            assert not is_dtensor
            share = local_experts(len(expected), ep_mesh)
            assert torch.equal(parameter, expected[share.start : share.stop]), name
        else:
            # What is not of the dominant dtype stays whole.
            is_sharded = is_fsdp2_model(model) and parameter.dtype == model.config.dtype
            assert is_dtensor == is_sharded, name
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(found, expected), name


def _loads_by(folder: Path, ep_size: int, dense: str, is_exact: bool, rank: int, size: int) -> None:
    plan = DistributionPlan(size, ep_size=ep_size, dense=dense)
    ep_mesh: Any = expert_parallel_mesh(plan, "cpu")["ep"] if plan.is_expert_parallel else None
    model, whole = load_pretrained(folder, plan, "cpu", ep_mesh=ep_mesh), _whole_model(folder)
    assert distribution_plan(model) == plan
    assert is_fsdp2_model(model) == plan.is_fsdp_dense
    assert isinstance(model, type(whole))
    assert type(model) is type(whole) or plan.is_fsdp_dense
    assert not model.training
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.name_or_path == str(folder)
    assert model.generation_config.max_new_tokens == 7
    _assert_same_parameters(model, whole, ep_mesh)
    experts: Any
    for experts in routed_experts(model).values() if ep_mesh else ():
        group = experts._parallel_state.expert_model_parallel_group.group
        assert group is ep_mesh.get_group()
    if is_exact:
        with torch.no_grad():
            logits, expected = model(_tokens(rank)).logits, whole(_tokens(rank)).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("ep_size", "dense"), PLANS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_load_pretrained_gives_the_model_of_from_pretrained(
    cpu_dist_workers: DistributedWorkerPool,
    checkpoint: Callable[..., Path],
    name: str,
    ep_size: int,
    dense: str,
) -> None:
    cpu_dist_workers.run(functools.partial(_loads_by, checkpoint(name), ep_size, dense, True))


@pytest.mark.parametrize("dense", ["replicate", "fsdp"])
def test_load_pretrained_gives_a_model_with_tied_weights(
    cpu_dist_workers: DistributedWorkerPool, checkpoint: Callable[..., Path], dense: str
) -> None:
    cpu_dist_workers.run(functools.partial(_loads_by, checkpoint("llama"), 1, dense, True))


@pytest.mark.parametrize(("ep_size", "dense"), PLANS)
def test_load_pretrained_keeps_the_dtypes_of_from_pretrained(
    cpu_dist_workers: DistributedWorkerPool,
    checkpoint: Callable[..., Path],
    ep_size: int,
    dense: str,
) -> None:
    folder = checkpoint("glm4_moe", torch.bfloat16)
    dtypes = {parameter.dtype for parameter in _whole_model(folder).parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    cpu_dist_workers.run(functools.partial(_loads_by, folder, ep_size, dense, False))


@pytest.mark.xdist_group("four_ranks")
@pytest.mark.parametrize("ep_size", [2, 4])
def test_load_pretrained_gives_replicas_of_expert_shares(
    four_ranks: DistributedWorkerPool, checkpoint: Callable[..., Path], ep_size: int
) -> None:
    folder = checkpoint("qwen3_moe", max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    four_ranks.run(functools.partial(_loads_by, folder, ep_size, "fsdp", True))


def _loads_in_the_dtype_of_the_tensors(folder: Path, rank: int, size: int) -> None:
    plan = DistributionPlan(size, ep_size=2)
    assert load_pretrained(folder, plan, "cpu").dtype == torch.bfloat16
    assert load_pretrained(folder, plan, "cpu", dtype=torch.float32).dtype == torch.float32


def test_load_pretrained_takes_the_dtype_from_the_tensors_where_the_config_lacks_it(
    cpu_dist_workers: DistributedWorkerPool, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint("qwen3_moe", torch.bfloat16)
    config = folder / "config.json"
    text = config.read_text("utf-8")
    assert '"dtype": "bfloat16"' in text
    config.write_text(re.sub(r'"dtype": "bfloat16",\s*', "", text), "utf-8")
    cpu_dist_workers.run(functools.partial(_loads_in_the_dtype_of_the_tensors, folder))


# ------------------------------------------------------------------ What a rank reads and keeps


def _counter(file: str, name: str) -> int:
    return int(Path(f"/proc/self/{file}").read_text("ascii").split(f"{name}:")[1].split()[0])


def _kept_bytes(model: Any) -> int:
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(tensor.nbytes for tensor in own)


def _reads_and_holds_its_part(
    folder: Path, small: Path, ep_size: int, dense: str, rank: int, size: int
) -> None:
    plan = DistributionPlan(size, ep_size=ep_size, dense=dense)
    load_pretrained(small, plan, "cpu")  # what is imported at the first use is no part of a load
    before_bytes = _counter("status", "VmRSS") * 1024
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak starts again from here
    read = _counter("io", "rchar")
    model = load_pretrained(folder, plan, "cpu")
    peak_bytes = _counter("status", "VmHWM") * 1024 - before_bytes
    kept = _kept_bytes(model)
    assert kept > 280 * 2**20
    assert _counter("io", "rchar") - read < 1.05 * kept + 2**20
    assert peak_bytes < 1.2 * kept, f"{peak_bytes / kept:.2f} of what it keeps"


@pytest.mark.slow
@pytest.mark.parametrize(("ep_size", "dense"), [(2, "replicate"), (2, "fsdp")])
def test_load_pretrained_reads_and_holds_little_more_than_a_rank_keeps(
    checkpoint: Callable[..., Path], tmp_path: Path, ep_size: int, dense: str
) -> None:
    # 600 MB, nearly all of them in the experts of 24 layers; their values do not matter.
    config = transformers.Qwen3MoeConfig(
        **{**MOE, "hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 24},
        num_experts=16,
        dtype=torch.bfloat16,
    )
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    del model
    # Ranks of its own, for other tests leave memory that this one would use again.
    pool = DistributedWorkerPool(2, backend="gloo")
    try:
        small = checkpoint("qwen3_moe")
        pool.run(functools.partial(_reads_and_holds_its_part, tmp_path, small, ep_size, dense))
    finally:
        pool.shutdown()


# -------------------------------------------------------------------------------- What is refused


def _no_reading(*_args: Any) -> NoReturn:
    raise AssertionError("read before the plan was checked")


def _refused(folder: Path, plans: list[DistributionPlan], rank: int, size: int) -> Any:
    with mock.patch.object(model_load_utils, "_stored", _no_reading):
        return bounded_outcome(rank, size, lambda *_: load_pretrained(folder, plans[rank], "cpu"))


@pytest.mark.parametrize(
    ("name", "plans", "error", "text"),
    [
        (
            "qwen3_moe",
            [DistributionPlan(4)] * 2,
            "ValueError",
            r"world_size \(4\) must be the number of live ranks \(2\)",
        ),
        (
            "llama",
            [DistributionPlan(2, ep_size=2)] * 2,
            "RuntimeError",
            "LlamaForCausalLM has no routed experts: plan it with ep_size=1",
        ),
        (
            "three_experts",
            [DistributionPlan(2, ep_size=2)] * 2,
            "ValueError",
            r"ep_size \(2\) must divide the number of experts \(3\) of model.layers.0.mlp.experts",
        ),
        (
            "qwen3_moe",
            [DistributionPlan(2, ep_size=2), DistributionPlan(2)],
            "ValueError",
            r"the same plan on every rank; got rank 0: .*ep_size=2.*; rank 1: .*ep_size=1",
        ),
    ],
)
def test_load_pretrained_refuses_a_plan_on_every_rank_before_it_reads(
    cpu_dist_workers: DistributedWorkerPool,
    checkpoint: Callable[..., Path],
    name: str,
    plans: list[DistributionPlan],
    error: str,
    text: str,
) -> None:
    for outcome in cpu_dist_workers.run(functools.partial(_refused, checkpoint(name), plans)):
        assert outcome.raised == error
        assert re.search(text, outcome.text)


def _loads_with_a_mesh_of_others(folder: Path, rank: int, size: int) -> Outcome:
    ep_mesh = expert_parallel_mesh(DistributionPlan(size, ep_size=2), "cpu")["ep"]
    plan = DistributionPlan(size)
    return bounded_outcome(
        rank, size, lambda *_: load_pretrained(folder, plan, "cpu", ep_mesh=ep_mesh)
    )


def test_load_pretrained_refuses_a_mesh_of_another_plan(
    cpu_dist_workers: DistributedWorkerPool, checkpoint: Callable[..., Path]
) -> None:
    job = functools.partial(_loads_with_a_mesh_of_others, checkpoint("qwen3_moe"))
    for outcome in cpu_dist_workers.run(job):
        assert outcome.raised == "ValueError"
        assert "ep_mesh must have ep_size (1) ranks; got DeviceMesh" in outcome.text


def _fails_on_rank_1(folder: Path, broken: str, rank: int, size: int) -> Outcome:
    def fail(*_args: Any) -> NoReturn:
        raise OSError("disk error")

    name = broken if rank == 1 else "__doc__"
    with mock.patch.object(model_load_utils, name, fail):
        plan = DistributionPlan(size, ep_size=2, dense="fsdp")
        return bounded_outcome(rank, size, lambda *_: load_pretrained(folder, plan, "cpu"))


@pytest.mark.parametrize("broken", ["_files", "_stored", "_keep_local_experts"])
def test_load_pretrained_fails_on_every_rank_where_one_fails(
    cpu_dist_workers: DistributedWorkerPool, checkpoint: Callable[..., Path], broken: str
) -> None:
    first, second = cpu_dist_workers.run(
        functools.partial(_fails_on_rank_1, checkpoint("qwen3_moe"), broken)
    )
    assert second.raised == "OSError"
    assert first.raised == "RuntimeError"
    assert "failed on rank 1: OSError: disk error" in first.text


def test_load_pretrained_loads_in_one_process(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3_moe")
    model = load_pretrained(str(folder), DistributionPlan(), torch.device("cpu"))
    _assert_same_parameters(model, _whole_model(folder), None)
    assert distribution_plan(model) == DistributionPlan()
    with pytest.raises(RuntimeError, match="needs a process group"):
        load_pretrained(folder, DistributionPlan(dense="fsdp"), "cpu")


def test_load_pretrained_puts_the_model_on_the_device(checkpoint: Callable[..., Path]) -> None:
    model = load_pretrained(checkpoint("llama"), DistributionPlan(), torch.device("meta"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def _qwen3_5() -> Any:
    """Return a VLM of which transformers' causal LM is the text part."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, "layer_types": ["full_attention"] * 3},
        vision_config={**vision, "out_hidden_size": 32},
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _gemma3() -> Any:
    """Return a VLM that is a causal LM as a whole."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=SIZES,
        vision_config={**vision, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [_qwen3_5, _gemma3])
def test_load_pretrained_gives_what_is_causal_of_a_vlm(
    tmp_path: Path, build: Callable[[], Any]
) -> None:
    build().save_pretrained(tmp_path)
    model, whole = load_pretrained(tmp_path, DistributionPlan(), "cpu"), _whole_model(tmp_path)
    assert type(model) is type(whole)
    assert type(model.config) is type(whole.config)
    _assert_same_parameters(model, whole, None)


def test_load_pretrained_refuses_a_folder_without_safetensors(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is not there"):
        load_pretrained(tmp_path, DistributionPlan(), "cpu")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00001.safetensors is not there"):
        load_pretrained(tmp_path, DistributionPlan(), "cpu")


def test_load_pretrained_refuses_a_checkpoint_with_tensors_missing(tmp_path: Path) -> None:
    model = transformers.Qwen3MoeForCausalLM(CONFIGS["qwen3_moe"]())
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        RuntimeError, match=r"lacks 1 tensors, model.norm.weight for one, on rank 0"
    ):
        load_pretrained(tmp_path, DistributionPlan(), "cpu")


# ------------------------------------------------------------------------------- Used further on


def _calibrates(folder: Path, rank: int, size: int) -> None:
    plan = DistributionPlan(size, ep_size=2, dense="fsdp")
    ep_mesh = expert_parallel_mesh(plan, "cpu")["ep"]
    model = load_pretrained(folder, plan, "cpu", ep_mesh=ep_mesh)
    calls: list[Any] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with bounded_collectives():
        loader: Any = [_tokens(rank)]
        loop = distributed_forward_loop(model, loader, ep_mesh=ep_mesh)
        loop(model)
    assert calls == [1]


def test_loaded_model_runs_in_the_forward_loop(
    cpu_dist_workers: DistributedWorkerPool, checkpoint: Callable[..., Path]
) -> None:
    cpu_dist_workers.run(functools.partial(_calibrates, checkpoint("qwen3_moe")))
