"""What every test shares: the modules in the repository's root, and runs that repeat exactly."""

import io
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

# ruff: noqa: E402
from tiny import random_head, random_model
from world import LIMIT, VOCAB, save, save_hf, save_tokenizer

from convert_hf_checkpoint import convert
from generate import main
from talon.cli import run
from talon.text import Engine, load
from talon.tokenizer import load_tokenizer

# Many tiny models: more threads than this only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


# ---------------------------------------------------------------- the small world of world.py


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A converted random target with tokenizer and template, heads for it and for others."""
    directory = tmp_path_factory.mktemp("world")
    model = random_model(vocab_size=VOCAB, max_seq_length=LIMIT)
    save_hf(directory, model)
    save_tokenizer(directory)
    convert(directory)
    save(directory / "head.safetensors", random_head(model), "draft")
    save(directory / "head3.safetensors", random_head(model, "eagle3"), "draft")
    other = random_model(vocab_size=VOCAB, dim=32, max_seq_length=LIMIT)
    save(directory / "other_head.safetensors", random_head(other), "draft")
    small = random_model(vocab_size=100, max_seq_length=LIMIT)
    save(directory / "small_vocab_head.safetensors", random_head(small), "draft")
    bare = directory / "bare"
    bare.mkdir()
    save(bare / "talon.safetensors", model, "target", eos_ids=[2])
    return directory


@pytest.fixture(scope="session")
def plain(world) -> Engine:
    return load(world / "talon.safetensors", compile=False)


@pytest.fixture(scope="session")
def tokenizer(world):
    return load_tokenizer(world)


@pytest.fixture
def cli(world, capfd, monkeypatch):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def call(
        *argv: object, stdin: str = "", target: Path | None = None, eager: bool = True
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        path = world / "talon.safetensors" if target is None else target
        words = ["--checkpoint_path", path, *argv, *(["--no_compile"] if eager else [])]
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: main([str(word) for word in words]))
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return call


@pytest.fixture
def refused(cli, tmp_path):
    """The command line ends with code 2 and one line that holds every word, and writes nothing."""

    def call(words: tuple[str, ...], *argv: object, **options) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, out, err = cli(*argv, **options)
        assert (code, out) == (2, ""), (code, out, err)
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), err
        for word in words:
            assert word in lines[0], (word, lines[0])
        assert len(lines[0]) < 600
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return call
