"""The wheel holds the seven files, talon and its data, and works where there is no checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny import random_model, save_byte_tokenizer

from talon.checkpoint import TensorSpec
from talon.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
DOOR = {
    "model.py", "eagle_draft.py", "generate.py", "convert_hf_checkpoint.py", "quantize.py",
    "train_draft.py", "benchmark.py",
}  # fmt: skip
LEFT_OUT = (".*", "build", "*.egg-info", "__pycache__", "checkpoints", "runs", "results")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what installing the wheel of a clean copy of the sources puts there."""
    base = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, base / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", base, base / "source"], check=True)
    with zipfile.ZipFile(next(base.glob("talon-*.whl"))) as file:
        file.extractall(base / "installed")
    return base / "installed"


def run(installed: Path, directory: Path, *arguments: object) -> str:
    """Standard output of Python in a directory, with what is installed and not the checkout."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny target with a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "talon.safetensors"
    model = random_model(vocab_size=256)
    tensors = model.state_dict()
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    write_checkpoint(
        path, kind="target", config=asdict(model.config), specs=specs, tensors=tensors.items()
    )
    save_byte_tokenizer(path.parent)
    return path


def test_the_wheel_holds_the_seven_files_and_talon_and_nothing_else(installed):
    found = {p.relative_to(installed).as_posix() for p in installed.rglob("*") if p.is_file()}
    found = {name for name in found if ".dist-info/" not in name}
    inside = {p for p in (ROOT / "talon").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert found == DOOR | {path.relative_to(ROOT).as_posix() for path in inside}
    data = {"talon/data/calibration.txt", "talon/data/tuning_prompts.jsonl"}
    assert found > data | {"talon/kernels/cpu_kernels.cpp"}


def test_the_pinned_torch_is_in_the_range_that_is_allowed_and_all_else_is_the_same():
    project = (ROOT / "pyproject.toml").read_text()
    project = re.search(r"dependencies = \[.*?\n(.*?)\]", project, re.S)
    allowed = [Requirement(line) for line in re.findall(r'"(.*?)"', project[1])]
    pinned = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines()]
    torch, version = allowed[0], next(iter(pinned[0].specifier)).version
    assert pinned[0].name == torch.name == "torch" and torch.specifier.contains(version)
    assert torch.specifier.contains("2.14.1") and pinned[1:] == allowed[1:]


@pytest.mark.slow
def test_what_is_installed_loads_and_generates_outside_the_checkout(
    installed, checkpoint, tmp_path
):
    program = f"""
import generate, talon.loading
assert all(m.__file__.startswith({str(installed)!r}) for m in (generate, talon.loading))
engine = generate.load({str(checkpoint)!r}, compile=False)
print(len("".join(engine.generate("Hello", max_new_tokens=5, ignore_eos=True))))
"""
    assert int(run(installed, tmp_path, "-c", program)) > 0
    given = ("--checkpoint_path", checkpoint, "--prompt", "Hello", "--no_compile")
    assert run(installed, tmp_path, "-m", "generate", *given, "--max_new_tokens", 5).strip()


@pytest.mark.slow
def test_what_is_installed_finds_its_prompts_and_calibration_text(installed, checkpoint, tmp_path):
    given = ("--checkpoint_path", checkpoint, "--mode", "int8", "--out", tmp_path / "int8")
    assert "linear layers in int8" in run(installed, tmp_path, "-m", "quantize", *given)
    program = "from talon.prompts import TUNING; print(TUNING, TUNING.is_file())"
    found = str(installed / "talon" / "data" / "tuning_prompts.jsonl")
    assert run(installed, tmp_path, "-c", program).split() == [found, "True"]
