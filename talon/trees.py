"""Trees: what is grown and what is kept, without a tensor in it.

A tree has a part that a head grows, chain, static or dynamic, and may have a chain of looked-up
tokens below the same root. Leaves out: growing them (talon/drafters)."""

import json
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """What to grow and what to keep. `nodes` counts the root too; `levels` those a head drafts.

    Growing records candidates in one flat order: the root's `top_k` children, then for each further
    level the `top_k` children of each of its `beam` expanded nodes. Static trees (chains too) say
    by flat index which candidates to expand and to keep; the dynamic tree (EAGLE-2, section 4)
    decides by cumulative score."""

    name: str
    nodes: int
    levels: int
    top_k: int
    beam: int
    expand: tuple[tuple[int, ...], ...] | None = None  # static: [levels - 1][beam] flat indices
    keep: tuple[int, ...] | None = None  # static: [grown - 1] flat indices, ascending
    lookup: int = 0  # a chain below the root that comes from the text itself: its tokens
    lookahead: tuple[int, int, int] | None = None  # columns, tokens of an n-gram, n-grams

    @property
    def candidates(self) -> int:
        return self.top_k + (self.levels - 1) * self.beam * self.top_k if self.levels else 0

    @property
    def needs_head(self) -> bool:
        return self.levels > 0

    @property
    def grown(self) -> int:
        """Nodes of the part that the head grows, the root included."""
        return self.nodes - self.lookup

    @property
    def depth(self) -> int:
        """Drafted tokens that one round can accept at most."""
        if self.lookahead:
            width, size, _ = self.lookahead
            return max(width + size - 3, size - 1)
        return min(self.levels, self.grown - 1) + self.lookup  # looked-up tokens may come behind

    @property
    def reach(self) -> int:
        """Slots past the committed ones that a round writes at most, of target or head."""
        return max(self.nodes, self.draft_slots)

    def cache_rows(self, max_seq_length: int, chunk: int) -> int:
        """Rows of a KV cache: a tree or a padded chunk of the prompt may run past the last legal
        position, which a round launched ahead passes by depth + 1 before it starts."""
        # One row more than any length bucket: one as long as the cache would compile as a constant.
        longest = max_seq_length + max(chunk, self.reach) + self.depth + 1
        return longest + -longest % 64 + 1

    @property
    def draft_slots(self) -> int:
        """Cache slots of a head, or of a small model, that growing needs behind the committed ones.
        The small model's are one further."""
        return max((self.levels - 1) * self.beam, self.depth + 1) + 1 if self.levels else 0

    def block(self, level: int) -> int:
        """Flat index of the first candidate of `level` (1 is the root's children)."""
        return 0 if level == 1 else self.top_k + (level - 2) * self.beam * self.top_k


NO_TREE = Tree("none", nodes=1, levels=0, top_k=0, beam=0)

SMALLEST_BUCKET = 256  # cache slots that attention reads at least


def bucket_widths(rows: int) -> list[int]:
    """How many slots attention may read of a cache of `rows`: powers of two, and all but one."""
    powers = (SMALLEST_BUCKET << i for i in range(rows.bit_length()))
    return [*(width for width in powers if width < rows - 1), rows - 1]


# The 26-node tree of the EAGLE-1 paper (root included), as paths of child ranks.
EAGLE1_PATHS = [
    [0], [1], [2], [3],
    [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0],
    [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0],
    [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2],
    [0, 0, 0, 0, 0], [0, 0, 0, 0, 1],
]  # fmt: skip


# The 64-node tree that Medusa publishes for Vicuna 7B (root included), a digit a rank.
MEDUSA_PATHS = [
    [int(rank) for rank in path]
    for path in (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 "
        "003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 "
        "15 101 021 90 060 0001 16 070"
    ).split()
]


FIXED = {"static": EAGLE1_PATHS, "medusa": MEDUSA_PATHS}


def chain(length: int) -> Tree:
    return static_tree([[0] * depth for depth in range(1, length + 1)], f"chain:{length}")


def static_tree(paths: list[list[int]], name: str) -> Tree:
    """A fixed tree from the rank paths of its nodes; every prefix of a path must be a path too."""
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    known = set(ordered)
    if not ordered or not all(p and min(p) >= 0 and max(*p, len(p)) <= 64 for p in ordered):
        raise ValueError(
            f"tree {name}: needs non-empty paths of child ranks 0 to 64, up to 64 levels, "
            "such as [[0], [0, 0]]"
        )
    for path in ordered:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"tree {name}: {list(path)} needs its parent {list(path[:-1])} too")
    levels = len(ordered[-1])
    top_k = 1 + max(rank for path in ordered for rank in path)
    inner = [sorted({p[:-1] for p in ordered if len(p) == level + 1}) for level in range(1, levels)]
    beam = max((len(nodes) for nodes in inner), default=1)
    flat: dict[tuple[int, ...], int] = {(rank,): rank for rank in range(top_k)}
    expand = []
    for level, nodes in enumerate(inner):
        start = top_k + level * beam * top_k
        expand.append(tuple(flat[node] for node in nodes) + (flat[nodes[0]],) * (beam - len(nodes)))
        flat |= {
            (*node, k): start + row * top_k + k
            for row, node in enumerate(nodes)
            for k in range(top_k)
        }
    keep = tuple(sorted(flat[path] for path in ordered))
    return Tree(name, len(ordered) + 1, levels, top_k, beam, tuple(expand), keep)


def dynamic_tree(nodes: int = 60, levels: int = 6, top_k: int = 10) -> Tree:
    """EAGLE-2 (arXiv 2406.16858): expand the `top_k` best nodes of each level, keep the best."""
    name = f"dynamic:nodes={nodes},levels={levels},top_k={top_k}"
    if nodes < 1 or levels < 1 or top_k < 1:
        raise ValueError(f"tree {name}: nodes, levels and top_k must all be at least 1")
    if nodes == 1:
        return NO_TREE
    tree = Tree(name, nodes, levels, top_k, top_k)
    if nodes - 1 > tree.candidates:
        most = f"lower nodes to {tree.candidates + 1}"
        raise ValueError(f"tree {name} cannot grow so large: {most} or raise levels or top_k")
    return tree


# Of a head's family, as in the papers (EAGLE-1 section 4, EAGLE-3 section 5).
# On a GPU also by how the target multiplies: so many rows cost hardly more than one (docs/gpu.md).
GPU_PRESETS = {
    "int8": "dynamic:nodes=32,levels=6,top_k=8", "int4": "dynamic:nodes=16,levels=4,top_k=4",
    "eagle1": "dynamic:nodes=60,levels=6,top_k=10",  # as in the paper of EAGLE-2
}  # fmt: skip
PRESETS = {
    "eagle1": "static",
    "eagle3": "dynamic:nodes=60,levels=8,top_k=10",
    "model": "chain:4",  # speculative sampling
}


def with_lookup(tree: Tree, count: int) -> Tree:
    """The tree with a chain of `count` looked-up tokens below its root."""
    name = f"lookup:{count}" if tree == NO_TREE else f"{tree.name}+lookup:{count}"
    return replace(tree, name=name, nodes=tree.nodes + count, lookup=count)


def lookahead_tree(width: int, size: int, guesses: int) -> Tree:
    """Lookahead decoding (arXiv 2402.02057): a window of `width` columns and size - 1 levels, the
    root among them, and `guesses` n-grams of `size` tokens that begin with the root."""
    name = f"lookahead:{width},{size},{guesses}"
    nodes = (width + guesses) * (size - 1)
    if not (width >= 1 and size >= 2 and 1 <= guesses and nodes <= 1024):
        raise ValueError(f"tree {name}: give W, G >= 1, N >= 2, (W + G) * (N - 1) <= 1024 nodes")
    return Tree(name, nodes, levels=0, top_k=0, beam=0, lookahead=(width, size, guesses))


def parse_tree(text: str) -> Tree:
    """The tree that `--tree TEXT` names: none, lookahead:W,N,G, lookup:K, or with a head chain:K,
    static, medusa, dynamic:nodes=,levels=,top_k=, FILE.json, these also with +lookup:K."""
    grown, _, count = text.partition("+lookup:")
    if is_length(count) and grown.partition(":")[0] not in ("auto", "none", "lookup", "lookahead"):
        return with_lookup(parse_tree(grown), int(count))
    kind, _, rest = text.partition(":")
    if text == "none":
        return NO_TREE
    if kind == "lookup" and is_length(rest):
        return with_lookup(NO_TREE, int(rest))
    if kind == "chain" and is_length(rest):
        return chain(int(rest))
    if text in FIXED:
        return static_tree(FIXED[text], text)
    numbers = rest.split(",")
    if kind == "lookahead" and len(numbers) == 3 and all(map(is_count, numbers)):
        return lookahead_tree(*map(int, numbers))
    if kind == "dynamic":
        pairs = [item.partition("=")[::2] for item in rest.split(",") if rest]
        known = all(key in ("nodes", "levels", "top_k") and is_count(value) for key, value in pairs)
        if known and len(dict(pairs)) == len(pairs):
            return dynamic_tree(**{key: int(value) for key, value in pairs})
    if text.endswith(".json"):
        return static_tree(read_paths(Path(text)), text)
    shown = text if len(text) < 60 else f"{text[:60]}..."
    raise ValueError(
        f"tree {shown!r} is not known: give auto, none, lookahead:W,N,G such as lookahead:5,3,5, "
        "lookup:K (1 to 64), or with a head chain:K (1 to 64), static, medusa, "
        "dynamic:nodes=60,levels=8,top_k=10, a FILE.json with a list of paths, "
        "those of a head also with +lookup:K"
    )


def is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def is_length(text: str) -> bool:
    return is_count(text) and 1 <= int(text) <= 64


def read_paths(path: Path) -> list[list[int]]:
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fault = f"tree file {path} cannot be read as JSON ({error})"
        raise ValueError(f"{fault}: give a list of paths") from None
    if not isinstance(paths, list) or not all(
        isinstance(p, list) and all(type(rank) is int for rank in p) for p in paths
    ):
        raise ValueError(f"tree file {path} is no list of rank paths, such as [[0], [1], [0, 0]]")
    return paths
