# SPDX-License-Identifier: Apache-2.0
"""`fsdp2_wrap` on real Hugging Face models over real ranks."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from _test_utils.torch.distributed.utils import DistributedWorkerPool
from torch import nn

import modelopt.torch.utils.distributed as mdist
from modelopt.torch.utils import fsdp2_utils
from modelopt.torch.utils.distributed import is_dtensor_sharded, is_fsdp2_model
from modelopt.torch.utils.fsdp2_utils import decoder_layers
from modelopt.torch.utils.plugins.model_load_utils import fsdp2_wrap

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 48}
LLAMA: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}


def _llama(**settings: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **settings))


def _moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **LLAMA, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _falcon() -> nn.Module:
    return transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES))


def _bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4)
    )


def _mpt() -> nn.Module:
    return transformers.MptForCausalLM(
        transformers.MptConfig(d_model=32, n_heads=4, n_layers=3, vocab_size=64)
    )


def _llava() -> nn.Module:
    vision = {**WIDE, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**LLAMA),
        vision_config=transformers.CLIPVisionConfig(**vision, projection_dim=32),
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "tied": functools.partial(_llama, tie_word_embeddings=True),
    "moe": _moe,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "llava": _llava,
}


@pytest.mark.parametrize("name", MODELS)
def test_decoder_layers_are_found(name: str) -> None:
    model: Any = MODELS[name]()
    layers = decoder_layers(model)
    assert len(layers) == 3
    # None of them is of the vision tower, and each is called once in a forward.
    called: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: called.append(module))
    model(input_ids=torch.arange(4).reshape(1, 4))
    assert called == layers


class _WithoutDecoder(nn.Module):
    def get_decoder(self) -> None:
        return None


class _TwoLists(nn.Module):
    """Its lists are both as long as the config says: which holds the layers cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(**LLAMA)
        self.first = nn.ModuleList([nn.ReLU()] * 3)
        self.second = nn.ModuleList([nn.ReLU()] * 3)

    def get_decoder(self) -> nn.Module:
        return self


@pytest.mark.parametrize("model", [nn.Linear(2, 2), _WithoutDecoder(), _TwoLists()])
def test_model_without_decoder_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=f"found none in {type(model).__name__}"):
        decoder_layers(model)


def test_wrap_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="needs a process group"):
        fsdp2_wrap(_llama())


def _built(name: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a model, the same on every rank, token ids, and its logits before it is wrapped."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return model, ids, logits


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def _wrapped_logits(name: str, rank: int, size: int) -> None:
    model, ids, expected = _built(name)
    model.config.architectures = ["Original"]
    expected_layers = decoder_layers(model)
    layers = fsdp2_wrap(model)
    assert layers == expected_layers
    assert all(is_fsdp2_model(layer) and _is_sharded(layer) for layer in layers)
    assert is_fsdp2_model(model)
    assert _is_sharded(model)
    assert model.config.architectures == ["Original"]
    for _ in range(2):
        with torch.no_grad():
            logits = model(input_ids=ids + 0).logits
        torch.testing.assert_close(logits, expected)
        # Sharded again: a layer's parameters are this rank's part only, the root's included.
        assert _is_sharded(model)
        local = sum(p.to_local().numel() for p in model.parameters())
        assert local <= 0.6 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_wrapped_model_computes_as_before(
    cpu_dist_workers: DistributedWorkerPool, name: str
) -> None:
    cpu_dist_workers.run(functools.partial(_wrapped_logits, name))


def _one_dtype_apart(is_trainable: bool, rank: int, size: int) -> list[str]:
    torch.manual_seed(0)
    model: Any = _moe().to(torch.bfloat16).eval()
    layers: list[Any] = decoder_layers(model)
    routers = [layer.mlp.gate for layer in layers]
    for router in routers:
        router.weight.data = router.weight.data.float()
        router.weight.requires_grad_(is_trainable)
        # As models with an fp32 router do: it computes in its own dtype.
        router.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    ids = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp2_wrap(model)
    for router in routers:
        assert not is_dtensor_sharded(router)
        assert router.weight.dtype == torch.float32
        assert router.weight.requires_grad == is_trainable
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    return [str(warning.message) for warning in caught if "fsdp2_wrap" in str(warning.message)]


@pytest.mark.parametrize("is_trainable", [True, False])
def test_parameters_of_another_dtype_stay_whole(
    cpu_dist_workers: DistributedWorkerPool, is_trainable: bool
) -> None:
    case = functools.partial(_one_dtype_apart, is_trainable)
    warned, silent = cpu_dist_workers.run(case)
    assert len(warned) == 1
    assert "keeps 3 parameters whole" in warned[0]
    assert silent == []


def test_dominant_dtype_is_that_of_most_elements() -> None:
    # Of most parameters it is the other one.
    model = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16(), nn.LayerNorm(64))
    with pytest.warns(UserWarning, match=r"keeps 2 parameters whole .* torch.bfloat16"):
        others = fsdp2_utils._keep_out(model, torch.device("cpu"))
    assert others == set(model[1].parameters())


def _other_ways(rank: int, size: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, ids, expected = _built("tied")
    layers = mdist.fsdp2_wrap(model, shard_root=False)
    assert all(_is_sharded(layer) for layer in layers)
    assert not is_dtensor_sharded(model.lm_head)
    assert not is_dtensor_sharded(model.model.norm)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected)

    model, ids, expected = _built("llama")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp2_wrap(model, mp_policy=policy, cpu_offload=True)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, atol=0.05, rtol=0.05)


def test_root_precision_and_offload_are_the_callers_choice(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    cpu_dist_workers.run(_other_ways)


def _whole_state(rank: int, size: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, _, _ = _built("tied")
    before = copy.deepcopy(model.state_dict())
    fsdp2_wrap(model)
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        assert set(state) == set(before)
        assert all(torch.equal(state[name], before[name]) for name in before)


def test_state_of_a_wrapped_model_gathers_whole(cpu_dist_workers: DistributedWorkerPool) -> None:
    cpu_dist_workers.run(_whole_state)
