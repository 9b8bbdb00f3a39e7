"""The house: which files stand at the door, which way imports point, how long things may be."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"generate", "convert_hf_checkpoint", "quantize", "train_draft", "benchmark"}
LEAVES = {
    f"talon.{n}"
    for n in (
        "checkpoint",
        "writing",
        "tokenizer",
        "settings",
        "prompts",
        "sampling",
        "trees",
        "cli",
    )
}
SHELVES = {"tuning", "training", "measuring", "formats", "serving", "quantising"}
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for pattern in ("*.py", "talon/**/*.py", "scripts/*.py")
    for path in ROOT.glob(pattern)
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
LINES = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in PATHS.items()}


def imports(node: ast.AST, late: bool = False) -> set[str]:
    """The modules of ours that a piece of code imports; with `late` also those in functions."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            found |= {child.module, *(f"{child.module}.{alias.name}" for alias in child.names)}
        elif late or not isinstance(child, ast.FunctionDef):
            found |= imports(child, late)
    return found & PATHS.keys()


@functools.cache
def imports_of(name: str, late: bool = False) -> set[str]:
    return imports(TREES[name], late)


def closure(names: set[str], late: bool = False) -> set[str]:
    """These modules, and all that importing them imports."""
    more = set().union(*(imports_of(name, late) for name in names)) - names
    return closure(names | more, late) if more else names


def shelf(name: str) -> str | None:
    return next(iter(SHELVES.intersection(name.split(".")[1:2])), None)


def may_import(name: str, other: str, late: bool) -> bool:
    on_top = name in COMMANDS or name.startswith("scripts.")
    if name in ("model", "eagle_draft"):
        return (name, other) == ("eagle_draft", "model")
    if name in LEAVES:
        return other in LEAVES
    if shelf(other):  # the core may reach for a shelf when it is needed, in a function
        pair = shelf(name), shelf(other)
        reaches = late and pair[0] is None
        return on_top or reaches or pair[0] == pair[1] or pair == ("measuring", "tuning")
    return other not in COMMANDS and not other.startswith("scripts.")


def test_the_seven_files_stand_at_the_door():
    assert {path.stem for path in ROOT.glob("*.py")} == COMMANDS | {"model", "eagle_draft"}


def test_imports_point_down_and_in_no_circle():
    for late in (False, True):
        pairs = {(name, other) for name in TREES for other in imports_of(name, late)}
        assert not {(name, other) for name, other in pairs if not may_import(name, other, late)}
    assert not [name for name in TREES if name in closure(imports_of(name, True), True)]


def test_no_function_and_no_file_is_too_long():
    nodes = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
    functions = [(name, node) for name, node in nodes if isinstance(node, ast.FunctionDef)]
    assert not [(name, f.name) for name, f in functions if f.end_lineno - f.lineno >= 60]
    assert not {name: lines for name, lines in LINES.items() if lines > 450}


def test_the_story_and_what_plain_decoding_imports_are_short():
    assert LINES["model"] + LINES["eagle_draft"] + LINES["talon.decoder"] <= 965
    found = closure({"generate"})
    assert not [name for name in found if shelf(name)]
    assert sum(LINES[name] for name in found) <= 4180  # sources 80, Qwen 60, cards 40
