"""What README and docs say to type works: bash and python blocks run, console flags exist."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))


def blocks(language: str) -> list[str]:
    """What is to be run stands in the README; what is to be typed also in docs/."""
    text = README + DOCS if language == "console" else README
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(language: str) -> list[list[str]]:
    """The commands of all blocks, comments and continued lines resolved."""
    lines = "".join(blocks(language)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model of `make demo`, fetched and converted if it is not there."""
    target = ROOT / "checkpoints" / "SmolLM2-135M-Instruct" / "talon.safetensors"
    if not target.exists():
        subprocess.run([sys.executable, "scripts/get_demo_model.py"], cwd=ROOT, check=True)
        convert = [
            sys.executable,
            "convert_hf_checkpoint.py",
            "--checkpoint_dir",
            str(target.parent),
        ]
        subprocess.run(convert, cwd=ROOT, check=True)
    return target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [words[1] for words in commands("bash") + commands("console") if words[0] == "make"]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_flag_exists(capsys, monkeypatch):
    helps = {}
    for words in commands("bash") + commands("console"):
        if words[0] not in ("python", "torchrun"):
            continue
        script = next(word for word in words if word.endswith(".py") or word.startswith("talon."))
        if script not in helps:
            name = f"{script}.__main__" if "-m" in words else Path(script).stem
            monkeypatch.setattr(sys, "argv", [script, "--help"])
            with pytest.raises(SystemExit, match="^0$"):
                import_module(name).main()
            helps[script] = capsys.readouterr().out
        for word in words[words.index(script) :]:
            if word.startswith("--"):
                assert re.search(rf"{re.escape(word)}\b", helps[script]), (script, word)
    assert len(helps) >= 6


def test_links_and_named_files_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page.name, link)
        for name in re.findall(r"`((?:talon|scripts|assets|docs)/[\w/.-]+\.\w+)`", text):
            assert (ROOT / name).exists(), (page.name, name)


@pytest.mark.slow
def test_commands_run(demo_model, tmp_path):
    for words in commands("bash"):
        if words[0] != "python":
            continue
        words = [
            str(tmp_path / word) if word.endswith((".json", ".png")) else word for word in words
        ]
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.strip(), (words, done.stderr)


@pytest.mark.slow
def test_library_example_runs(demo_model):
    (example,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout) > 20, done.stderr
