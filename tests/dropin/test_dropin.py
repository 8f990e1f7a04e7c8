# SPDX-License-Identifier: Apache-2.0
"""The module inside nvidia-modelopt, the larger library, on real ranks: `pytest -m dropin`."""

import ast
import filecmp
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin.environment import ROOT, Environment, published, readme_block
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.dropin,
    pytest.mark.xdist_group("dropin"),
    # The first test makes the environment, in a minute where the network is good.
    pytest.mark.timeout(900),
]

MODULE = "modelopt.torch.utils.distributed"
PROBE = Path(__file__).with_name("probe.py")
OURS = {
    "torch/utils/distributed.py",
    "torch/utils/fsdp2_utils.py",
    "torch/utils/plugins/expert_parallel.py",
}
CONFIGS = ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG")
# The largest value of the quantized dtype; a scale is amax over it.
MAXBOUND = {"FP8_DEFAULT_CFG": 448, "INT8_DEFAULT_CFG": 127}
DTYPE = {"FP8_DEFAULT_CFG": torch.float8_e4m3fn, "INT8_DEFAULT_CFG": torch.int8}
ALGORITHM = {"FP8_DEFAULT_CFG": "FP8", "INT8_DEFAULT_CFG": "W8A8_SQ_PER_CHANNEL"}
# An amax for the input and one for the weight of 7 linears of each of 2 layers; of 4, and for the
# experts of each layer two for their inputs and 2 * 8 for their weights.
AMAXES = {"llama": 28, "qwen3_moe": 52}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

# Wrong experts move a logit by 0.7; a rounding that falls to the other side must not matter.
QUANTIZED_ATOL = 0.05

by_config = pytest.mark.parametrize("config", CONFIGS)
by_model = pytest.mark.parametrize("model", AMAXES)


def _result(folder: Path, case: str, size: int, rank: int = 0) -> Any:
    return torch.load(folder / f"{case}-{size}-{rank}.pt", weights_only=True)


def _assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == list(expected)
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


# ------------------------------------------------------------------------- What is put in, and fits


def test_three_files_are_put_in_and_no_other_is_touched(library: Environment) -> None:
    original = published().library
    names = {str(p.relative_to(library.library)) for p in library.library.rglob("*.py")}
    assert names == {str(p.relative_to(original)) for p in original.rglob("*.py")} | OURS
    _, different, missing = filecmp.cmpfiles(original, library.library, names, shallow=False)
    assert {*different, *missing} == OURS
    _, different, missing = filecmp.cmpfiles(ROOT / "modelopt", library.library, OURS, False)
    assert different == missing == []


def _callers(library: Path) -> dict[str, set[str]]:
    """Return the library's modules that import ours, each with the names that it takes of it."""
    callers = {}
    for path in sorted(library.rglob("*.py")):
        parts = ("modelopt", *path.relative_to(library).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        aliases, names = _imported(tree, ".".join(parts[:-1]))
        if aliases or names:
            names |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases
            }
            callers[".".join(parts).removesuffix(".__init__")] = names
    return callers


def _imported(tree: ast.Module, package: str) -> tuple[set[str], set[str]]:
    """Return the names that a module of `package` has for ours, and the names it takes from it."""
    aliases, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == MODULE}
        elif isinstance(node, ast.ImportFrom):
            # Each dot after the first leads one package up.
            above = package.split(".")[: -(node.level - 1) or None] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            if source == MODULE:
                names |= {alias.name for alias in node.names}
            elif source == MODULE.rpartition(".")[0]:
                ours = [alias for alias in node.names if alias.name == "distributed"]
                aliases |= {alias.asname or alias.name for alias in ours}
    return aliases, names


def _probed(environment: Environment, modules: list[str]) -> dict[str, Any]:
    done = environment.run("python", PROBE, *modules)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["file"] == str(environment.library / "torch" / "utils" / "distributed.py")
    return found


@pytest.fixture(scope="module")
def probes(library: Environment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the library's callers find: as it is published, and with our files in."""
    modules = list(_callers(published().library))
    return _probed(published(), modules), _probed(library, modules)


def test_every_name_that_the_library_takes_is_there(
    probes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    callers = _callers(published().library)
    assert len(callers) >= 40
    # The scan itself sees what is imported by name, and what is taken off an imported module.
    taken = set.union(*callers.values())
    assert {"broadcast_state_dict", "DistributedProcessGroup", "is_last_process"} <= taken
    names = set(probes[1]["names"])
    assert {module: missing for module, used in callers.items() if (missing := used - names)} == {}


def test_every_module_that_imports_ours_imports_as_before(
    probes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    before, after = (probe["imports"] for probe in probes)
    assert after == before
    failed = {module: outcome for module, outcome in after.items() if outcome != "imported"}
    # What the library itself lacks in an environment without GPUs: megatron, apex, hydra, ...
    assert all(outcome.startswith("ModuleNotFoundError") for outcome in failed.values()), failed
    assert not any("'modelopt" in outcome for outcome in failed.values()), failed
    assert len(after) - len(failed) >= 20


def test_signatures_are_the_librarys_or_take_more(
    probes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    before, after = (probe["signatures"] for probe in probes)
    checked = {name for name in before if not re.search(r"(^|\.)_[a-z]", name)} | {"_serialize"}
    assert len(checked) >= 30
    for name in checked:
        parameters = after[name]
        assert parameters[: len(before[name])] == before[name], name
        for _, _, default in parameters[len(before[name]) :]:
            assert default != repr(inspect.Parameter.empty), name


# -------------------------------------------------------------------------------- The older helpers


@pytest.mark.parametrize("rank", [0, 1])
def test_older_helpers_serve_cpu_ranks(two_ranks: Path, rank: int) -> None:
    result = _result(two_ranks, "older_helpers", 2, rank)
    gathered = result.pop("allgather")
    assert [tensor.tolist() for tensor in gathered] == [[0], [1, 1]]
    state = result.pop("broadcast_state_dict")
    assert list(state) == ["b", "a"]
    assert torch.equal(state["b"], torch.ones(2, 3))
    assert torch.equal(state["a"], torch.arange(3))
    assert result.pop("allreduce of tensors").tolist() == [2.0, 1.0]
    assert result.pop("lock") in ([[True, False], [False, False]], [[False, False], [True, False]])
    assert result == {
        "who": (rank, 2, rank, "torch"),
        "first and last": (rank == 0, rank == 1),
        "broadcast": {"rank": 0},
        "broadcast of 1": [1],
        "allgather in a group": [0, 1],
        "allreduce": 3,
        "master_only": (2, [0] if rank == 0 else []),
        "group": (rank, 2),
        "synced": 1,
        "group after cleanup": False,
    }


# ------------------------------------------------------------------------------ Quantizing for real


@by_config
@by_model
@pytest.mark.parametrize("placement", ["replicated", "fsdp2"])
def test_every_amax_is_that_of_one_process_on_all_data(
    one_process: Path, two_ranks: Path, placement: str, model: str, config: str
) -> None:
    expected = _result(one_process, f"replicated-{model}-{config}", 1)["amaxes"]
    assert len(expected) == AMAXES[model]
    for rank in (0, 1):
        result = _result(two_ranks, f"{placement}-{model}-{config}", 2, rank)
        _assert_same(result["amaxes"], expected)


@by_config
@by_model
def test_rank_0_exports_a_whole_checkpoint_while_the_others_wait(
    two_ranks: Path, model: str, config: str
) -> None:
    where = two_ranks / f"replicated-{model}-{config}-2"
    files = ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors"]
    for rank in (0, 1):
        result = _result(two_ranks, f"replicated-{model}-{config}", 2, rank)
        assert result["exporters"] == [[0], []]
        assert result["files"] == files
    assert sorted(path.name for path in where.iterdir()) == files
    saved = json.loads((where / "config.json").read_text())
    assert saved["architectures"] == [ARCHITECTURES[model]]
    assert saved["quantization_config"]["quant_algo"] == ALGORITHM[config]
    _assert_whole(where, config, result["amaxes"])


def _assert_whole(where: Path, config: str, amaxes: dict[str, torch.Tensor]) -> None:
    """Check each tensor of a checkpoint against the model's before it was quantized."""
    before = load_file(where.with_name(f"{where.name}-before") / "model.safetensors")
    after = load_file(where / "model.safetensors")
    linear = re.compile(r"\.(self_attn\.\w+_proj|mlp\.(experts\.\d+\.)?\w+_proj)\.weight$")
    quantized = {name.removesuffix(".weight") for name in before if linear.search(name)}
    scales = {f"{name}.{kind}_scale" for name in quantized for kind in ("weight", "input")}
    assert set(after) == set(before) | scales
    for name, weight in before.items():
        if name.removesuffix(".weight") not in quantized:
            assert torch.equal(after[name], weight), name
            continue
        assert after[name].dtype == DTYPE[config]
        scale = after[f"{name}_scale"].reshape(-1, *[1] * (weight.dim() - 1))
        # A step of FP8 is up to a sixteenth of a value to either side.
        error = (after[name].float() * scale - weight).abs()
        assert (error <= weight.abs() / 15 + scale * 0.51).all(), name
        amax = amaxes.get(f"{name.removesuffix('.weight')}.input_quantizer._amax")
        if amax is not None:
            scale = after[f"{name.removesuffix('.weight')}.input_scale"]
            torch.testing.assert_close(scale, amax / MAXBOUND[config])


# ------------------------------------------------------------------------------- Expert parallelism


@by_config
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_experts_are_quantized_as_whole_ones(
    request: pytest.FixtureRequest, size: int, config: str
) -> None:
    folder: Path = request.getfixturevalue("two_ranks" if size == 2 else "four_ranks")
    results = [_result(folder, f"expert_parallel-{config}", size, rank) for rank in range(size)]
    for rank, result in enumerate(results):
        assert result["classes"] == ["QuantQwen3MoeExperts"] * 2
        # The forwards are the all-to-all ones: half of the experts give the logits of all.
        torch.testing.assert_close(*result["plain"], atol=1e-5, rtol=0)
        torch.testing.assert_close(*result["quantized"], atol=QUANTIZED_ATOL, rtol=0)
        expected = result["whole amaxes"]
        assert len(result["amaxes"]) == AMAXES["qwen3_moe"] - 2 * 2 * 4
        for name, amax in result["amaxes"].items():
            torch.testing.assert_close(amax, expected[_name_in_whole(name, rank)], msg=name)
            # Bit-equal, where ranks hold the same.
            if "weight_quantizers" not in name:
                assert torch.equal(amax, results[0]["amaxes"][name]), name
        _assert_same(result["amaxes"], results[rank % 2]["amaxes"])


def _name_in_whole(name: str, rank: int) -> str:
    """Return the name that a quantizer has in the whole model, where experts have other numbers."""
    before, of_experts, after = name.partition("_weight_quantizers.")
    if not of_experts:
        return name
    number, rest = after.split(".", 1)
    return f"{before}{of_experts}{int(number) + 4 * (rank % 2)}.{rest}"


@pytest.mark.parametrize("size", [2, 4])
def test_rank_whose_experts_see_no_token_is_named_on_every_rank(
    request: pytest.FixtureRequest, size: int
) -> None:
    folder: Path = request.getfixturevalue("two_ranks" if size == 2 else "four_ranks")
    for rank in range(size):
        error, alive = _result(folder, "starved", size, rank)
        starved = [f"'model.layers.{layer}.mlp.experts' of rank 1" for layer in (0, 1)]
        assert f"none came to {', '.join(starved)}. " in error
        assert alive == list(range(size))


# --------------------------------------------------------------------------------------- The README


def test_script_of_the_readme_exports(library: Environment, tmp_path: Path) -> None:
    script = readme_block("python")
    assert len(script.splitlines()) <= 25
    (tmp_path / "quantize.py").write_text(script)
    [command] = re.findall(r"`(torchrun [^`]*quantize\.py)`", (ROOT / "README.md").read_text())
    done = library.run("bash", "-c", command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Calibrating: 100%" in done.stderr
    tensors = load_file(tmp_path / "llama-fp8" / "model.safetensors")
    quantized = [name for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 2 * 7
    assert all(f"{name.removesuffix('.weight')}.input_scale" in tensors for name in quantized)
    # Two ranks, each on its half: a line of progress, of rank 0, over 4 of the 8 batches.
    assert "4/4" in done.stderr
