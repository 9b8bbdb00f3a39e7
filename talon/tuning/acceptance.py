"""How many tokens any tree would have accepted, from one recorded decoding.

A few texts are decoded plainly while the head grows a wide tree at every position, all of whose
candidates are kept. Which of them came true says what a chain, a static or a smaller dynamic tree
accepts there, and the text itself what a lookup does; decoding with one of them is then a walk over
the positions. That is exact as far as the wide tree covers the other: what grows only outside its
beam counts as wrong. Leaves out: costs (costs.py) and the choice (choice.py)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from eagle_draft import Entries, Pick
from model import At
from talon.decoder import Decoder
from talon.drafters.eagle import Candidates, flat
from talon.drafters.lookup import look_up, look_up_tree
from talon.drafters.source import RootOnly
from talon.sampling import SamplingConfig
from talon.trees import Tree

LOOKED_AHEAD = 16  # tokens of a lookup that are compared
LOOKUPS = (2, 3, 5, 7, 10, 15)  # tokens looked up alone
END = -1  # in a recorded text for its stop token: no guess, since a round gives it anyway


@dataclass(frozen=True)
class Recording:
    """What would have been guessed at the R positions of some texts, and which of it came true. M
    candidates, L levels.

    scores: fp64 [R, M]; parents: int64 [R, M], flat; truth: int64 [R, L], flat index of the true
    token's candidate at each depth, -1 from the first depth at which the recorded candidates miss
    it; looked_up: int64 [R], true tokens of a lookup; alone: int64 [R, len(LOOKUPS)], accepted of
    the trees lookup:K; counts: positions of each text."""

    tree: Tree
    scores: np.ndarray
    parents: np.ndarray
    truth: np.ndarray
    looked_up: np.ndarray
    alone: np.ndarray
    counts: list[int]

    @property
    def ranks(self) -> np.ndarray:
        """int64 [R, L]: the rank of the true token among its siblings; -1 where it was missed."""
        return np.where(self.truth < 0, -1, self.truth % self.tree.top_k)

    def accepted_per_round(self, accepted: np.ndarray) -> float:
        """Mean over the rounds of decoding these texts with a draft that accepts `accepted` int64
        [R] tokens at each position: a round goes on behind its bonus token."""
        values, total, rounds, first = accepted.tolist(), 0, 0, 0
        for count in self.counts:
            at = first
            while at < first + count:
                total, rounds, at = total + values[at], rounds + 1, at + values[at] + 1
            first += count
        return total / max(rounds, 1)


def record(
    decoder: Decoder, prompts: list[list[int]], budget: int, sampling: SamplingConfig
) -> Recording:
    """Decode plainly, with a dynamic tree grown at every position and every candidate kept. An
    answer that ended goes no further, as in real decoding: what models say behind their stop token
    repeats itself. One that is broken off after `budget` tokens goes on so far that the last
    position sees what follows it."""
    tree = decoder.tree
    beyond = max(tree.levels, LOOKED_AHEAD)
    rows, counts, pick = [], [], decoder.picks.set(sampling)
    for ids in prompts:
        text, seen = decode_plainly(decoder, ids, budget, beyond, pick)
        padded = text + [END] * beyond if text[-1] == END else text
        count = max(min(len(seen), len(padded) - len(ids) - beyond), 0)
        for at, (tokens, scores, parents) in enumerate(seen[:count], start=len(ids)):
            truth = true_path(tree, tokens, parents, padded[at + 1 : at + 1 + tree.levels])
            ahead = padded[at + 1 : at + 1 + LOOKED_AHEAD]
            row = scores.astype(np.float64), parents, truth, *looked_up(text, at, ahead)
            rows.append(row)
        counts.append(count)
    return Recording(tree, *(np.array([row[part] for row in rows]) for part in range(5)), counts)


@torch.inference_mode()
def decode_plainly(
    decoder: Decoder, ids: list[int], budget: int, beyond: int, pick: Pick
) -> tuple[list[int], list[Candidates]]:
    """Rounds in which the head grows its tree and learns as ever, but nothing is put to the target;
    then `beyond` without even that. Returns prompt and answer, with END for its stop token, and
    what was grown at each position."""
    decoder.forget()
    root, length, drafter = decoder.root, decoder.length, decoder.drafter
    plain, seen = RootOnly(decoder.device), []
    text, stop_ids = [*ids, decoder.prefill(ids, 0, pick)], decoder.model.config.eos_ids
    longest = min(len(ids) + budget + beyond, decoder.max_seq_length)
    while len(text) < longest and text[-1] not in stop_ids:
        at = decoder.at(len(text) + decoder.tree.reach)
        drafting = len(text) <= len(ids) + budget
        if drafting:
            seen.append([tensor.cpu().numpy() for tensor in flat(drafter.grow(at, pick))])
        nodes = plain.propose(root, at, pick)
        emitted, path, count, features, _ = decoder.verify(decoder.target, nodes, at, pick, 1)
        if drafting:
            drafter.learn(Entries(features, path, emitted, length, count - 1), at)
        root.copy_(emitted)
        length.add_(count)
        text.append(int(root))
    return ([*text[:-1], END] if text[-1] in stop_ids else text), seen


def true_path(tree: Tree, tokens: np.ndarray, parents: np.ndarray, ahead: list[int]) -> list[int]:
    """Flat index of the candidate that is true at each depth, -1 from the first miss on."""
    path, parent = [], -1
    for level, token in enumerate(ahead, start=1):
        block = slice(tree.block(level), tree.block(level + 1))
        found = np.flatnonzero((tokens[block] == token) & (parents[block] == parent))
        if not len(found):
            break
        parent = block.start + int(found[0])
        path.append(parent)
    return path + [-1] * (len(ahead) - len(path))


def looked_up(text: list[int], root: int, ahead: list[int]) -> tuple[int, list[int]]:
    """How many tokens of a lookup from position `root` on are those that came; and how many each of
    the trees of LOOKUPS has accepted."""
    history, alone = torch.tensor([-1, *text[1 : root + 1], -1]), []
    at, came = At(torch.tensor([root]), torch.arange(root + 1)), torch.tensor(ahead)
    for count in LOOKUPS:
        tokens, parents, ancestors = look_up_tree(history[root : root + 1], history, at, count)
        right = tokens == came[ancestors.sum(1) - 2]
        right[0] = True
        alone.append(int((ancestors.sum(1) * ~(ancestors & ~right).any(1)).max()) - 1)
    same = look_up(history, at, len(ahead)) == came
    return int(same.long().cumprod(0).sum()), alone


def paths_accepted(recording: Recording, paths: Iterable[Iterable[int]]) -> np.ndarray:
    """int64 [R]: accepted nodes of a static tree, given by its rank paths, in every round."""
    kept, levels = {tuple(path) for path in paths}, range(1, recording.tree.levels + 1)
    ranks = recording.ranks.tolist()
    found = [[tuple(row[:depth]) in kept for depth in levels] for row in ranks]
    return np.array(found).cumprod(1).sum(1)


def dynamic_accepted(
    recording: Recording, top_k: int, levels: int, nodes: Iterable[int]
) -> dict[int, np.ndarray]:
    """int64 [R] for each of several sizes: accepted nodes of a dynamic tree in every round, by
    selecting again from what was recorded."""
    tree, scores = recording.tree, recording.scores
    rank = np.arange(scores.shape[1]) % tree.top_k
    allowed, beam = (np.zeros(scores.shape, dtype=bool) for _ in range(2))
    for level in range(1, levels + 1):
        block = slice(tree.block(level), tree.block(level + 1))
        grown = np.broadcast_to(rank < top_k, scores.shape)[:, block]
        if level > 1:
            grown = grown & np.take_along_axis(beam, recording.parents[:, block], 1)
        allowed[:, block] = grown
        best = np.argsort(np.where(grown, -scores[:, block], np.inf), axis=1, kind="stable")
        expanded = np.zeros_like(grown)
        np.put_along_axis(expanded, best[:, :top_k], True, 1)
        beam[:, block] = expanded & grown
    order = np.argsort(np.where(allowed, -scores, np.inf), axis=1, kind="stable")
    place = np.argsort(order, axis=1)  # of every candidate in the order of selection
    truth = recording.truth[:, :levels]
    at = np.where(truth < 0, 0, truth)
    usable = (truth >= 0) & np.take_along_axis(allowed, at, 1)
    places = np.where(usable, np.take_along_axis(place, at, 1), place.shape[1])
    return {n: (places < n - 1).cumprod(1).sum(1) for n in nodes}


def likely_paths(recording: Recording, nodes: int, levels: int) -> list[list[int]]:
    """The `nodes - 1` rank paths that are most often true, by the share of each rank at a depth."""
    ranks = recording.ranks
    share = []
    for depth in range(levels):
        reached = ranks[:, depth][(ranks[:, :depth] >= 0).all(1)]
        counts = np.bincount(reached[reached >= 0], minlength=recording.tree.top_k)
        share.append(counts / max(len(reached), 1))
    ready = [((rank,), chance) for rank, chance in enumerate(share[0].tolist())]
    chosen: list[list[int]] = []
    while ready and len(chosen) < nodes - 1:
        ready.sort(key=lambda item: (-item[1], item[0]))
        path, value = ready.pop(0)
        if value <= 0:
            break
        chosen.append(list(path))
        if len(path) < levels:
            following = enumerate(share[len(path)].tolist())
            ready += [((*path, rank), value * chance) for rank, chance in following]
    return chosen
