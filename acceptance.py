"""How many tokens any tree would have accepted, from one recorded decoding.

A few texts are decoded with a wide dynamic tree whose every candidate is kept. Which of them came
true says, by counting, what a chain, a static or a smaller dynamic tree accepts; what lookup
accepts follows from the texts themselves. Leaves out: costs and the choice (tuning.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from eagle_draft import Tree
from engine import Decoder
from lookup_draft import look_up
from sampling import SamplingConfig

END = (
    -1
)  # what stands in a recorded text for its stop token: no guess, since a round gives it anyway


@dataclass(frozen=True)
class Recording:
    """What the head guessed in R rounds of the probe tree, and which of it came true. M candidates,
    L levels.

    scores: fp64 [R, M]; parents: int64 [R, M], flat; truth: int64 [R, L], flat index of the true
    token's candidate at each depth, -1 from the first depth at which the recorded candidates miss
    it; looked_up: int64 [R], how many tokens of a lookup at the same place are true, L at most.
    texts: prompt and answer ids, END last where the answer ended, with the prompt's length.
    """

    tree: Tree
    scores: np.ndarray
    parents: np.ndarray
    truth: np.ndarray
    looked_up: np.ndarray
    texts: list[tuple[list[int], int]]

    @property
    def ranks(self) -> np.ndarray:
        """int64 [R, L]: the rank of the true token among its siblings; -1 where it was missed."""
        return np.where(self.truth < 0, -1, self.truth % self.tree.top_k)


def record(
    decoder: Decoder, prompts: list[list[int]], budget: int, sampling: SamplingConfig
) -> Recording:
    """Decode with a dynamic tree, eyes on every candidate. Rounds too close to where a text was
    broken off tell nothing: dropped. An answer that ended goes no further, as in real decoding:
    what models say behind their stop token repeats itself.
    """
    tree, drafter, seen = decoder.tree, decoder.drafter, []
    select = drafter.select

    def spy(
        tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, *rest: int
    ) -> object:
        seen.append((decoder.length.clone(), tokens.clone(), scores.clone(), parents.clone()))
        return select(tokens, scores, parents, *rest)

    drafter.select = spy
    rows, texts = [], []
    decoder.sampling.set(sampling)
    for ids in prompts:
        seen.clear()
        text = decode_unlaunched(decoder, ids, budget + tree.levels, sampling.kind)
        texts.append((text, len(ids)))
        beyond = [END] * tree.levels if text[-1] == END else []
        for length, *round_ in seen:
            ahead = [*text[int(length) + 1 :], *beyond][: tree.levels]
            if len(ahead) == tree.levels:
                tokens, scores, parents = (tensor.cpu().numpy() for tensor in round_)
                truth = true_path(tree, tokens, parents, ahead)
                found = looked_up(text, int(length), ahead)
                rows.append((scores.astype(np.float64), parents, truth, found))
    drafter.select = select
    return Recording(tree, *(np.array([row[part] for row in rows]) for part in range(4)), texts)


@torch.inference_mode()
def decode_unlaunched(decoder: Decoder, ids: list[int], budget: int, kind: str) -> list[int]:
    """Decode by plain calls of the round, without a graph. Returns prompt and answer, with END for
    its stop token.
    """
    decoder.cached = []
    text, stop_ids = [*ids, decoder.prefill(ids, 0, kind)], set(decoder.model.config.eos_ids)
    longest = min(len(ids) + budget, decoder.max_seq_length - decoder.tree.levels)
    while len(text) < longest and not stop_ids & set(text[len(ids) :]):
        decoder.round(decoder.slots(len(text) + decoder.reach), kind)
        count, *tokens = decoder.report.tolist()
        text += tokens[:count]
    for at in range(len(ids), len(text)):
        if text[at] in stop_ids:
            return [*text[:at], END]
    return text


def true_path(tree: Tree, tokens: np.ndarray, parents: np.ndarray, ahead: list[int]) -> list[int]:
    """Flat index of the candidate that is true at each depth, -1 from the first miss on."""
    path, parent = [], -1
    for level, token in enumerate(ahead, start=1):
        start = tree.block(level)
        block = slice(start, start + (tree.top_k if level == 1 else tree.beam * tree.top_k))
        found = np.flatnonzero((tokens[block] == token) & (parents[block] == parent))
        if not len(found):
            return path + [-1] * (len(ahead) - len(path))
        parent = start + int(found[0])
        path.append(parent)
    return path


def looked_up(text: list[int], root: int, ahead: list[int]) -> int:
    """How many tokens of a lookup from position `root` on are those that came."""
    history = torch.tensor([-1, *text[1:]])
    guesses = look_up(history, torch.tensor([root]), torch.arange(len(text)), len(ahead)).tolist()
    return next((i for i in range(len(ahead)) if guesses[i] != ahead[i]), len(ahead))


def paths_accepted(recording: Recording, paths: Iterable[Iterable[int]]) -> np.ndarray:
    """int64 [R]: accepted nodes of a static tree, given by its rank paths, in every round."""
    kept = {tuple(path) for path in paths}
    return np.array([accepted_depth(ranks, kept) for ranks in recording.ranks.tolist()])


def accepted_depth(ranks: list[int], kept: set[tuple[int, ...]]) -> int:
    """How far the true path stays inside the tree."""
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in kept:
        depth += 1
    return depth


def dynamic_accepted(
    recording: Recording, top_k: int, levels: int, nodes: Iterable[int]
) -> dict[int, np.ndarray]:
    """int64 [R] for each of several sizes: accepted nodes of a dynamic tree in every round, by
    selecting again from what was recorded.
    """
    tree, scores = recording.tree, recording.scores
    count = scores.shape[0]
    rank = np.arange(scores.shape[1]) % tree.top_k
    allowed = np.zeros(scores.shape, dtype=bool)
    beam = np.zeros(scores.shape, dtype=bool)
    for level in range(1, levels + 1):
        start = tree.block(level)
        block = np.arange(start, start + (tree.top_k if level == 1 else tree.beam * tree.top_k))
        grown = np.broadcast_to(rank[block] < top_k, (count, len(block)))
        if level > 1:
            grown = grown & np.take_along_axis(beam, recording.parents[:, block], 1)
        allowed[:, block] = grown
        best = np.argsort(np.where(grown, -scores[:, block], np.inf), axis=1, kind="stable")[
            :, :top_k
        ]
        expanded = np.zeros_like(grown)
        np.put_along_axis(expanded, best, True, 1)
        beam[:, block] = expanded & grown
    order = np.argsort(np.where(allowed, -scores, np.inf), axis=1, kind="stable")
    place = np.argsort(order, axis=1)  # of every candidate in the order of selection
    truth = recording.truth[:, :levels]
    at = np.where(truth < 0, 0, truth)
    usable = (truth >= 0) & np.take_along_axis(allowed, at, 1)
    places = np.where(usable, np.take_along_axis(place, at, 1), place.shape[1])
    return {n: (places < n - 1).cumprod(1).sum(1) for n in nodes}


def lookup_acceptance(recording: Recording, count: int) -> float:
    """Mean accepted tokens of `lookup:count`, by running it over the texts as decoding would."""
    total = rounds = 0
    for text, prompt in recording.texts:
        at, padded = prompt, text + [END] * count
        last = len(text) - (1 if text[-1] == END else count)
        while at < last:
            good = looked_up(text, at, padded[at + 1 : at + 1 + count])
            total, rounds, at = total + good, rounds + 1, at + good + 1
    return total / max(rounds, 1)


def likely_paths(recording: Recording, nodes: int, levels: int) -> list[list[int]]:
    """The `nodes - 1` rank paths that are most often true, by the measured share of each rank at
    each depth.
    """
    ranks = recording.ranks
    share = []
    for depth in range(levels):
        reached = ranks[:, depth][(ranks[:, :depth] >= 0).all(1)]
        counts = np.bincount(reached[reached >= 0], minlength=recording.tree.top_k)
        share.append(counts / max(len(reached), 1))
    ready = [((rank,), float(share[0][rank])) for rank in range(recording.tree.top_k)]
    chosen: list[list[int]] = []
    while ready and len(chosen) < nodes - 1:
        ready.sort(key=lambda item: (-item[1], item[0]))
        path, value = ready.pop(0)
        if value <= 0:
            break
        chosen.append(list(path))
        if len(path) < levels:
            following = share[len(path)]
            ready += [
                ((*path, rank), value * float(following[rank])) for rank in range(len(following))
            ]
    return chosen


def depth_and_rank(recording: Recording) -> list[list[float]]:
    """[L][K]: share of all rounds in which the true path reached this depth by a child of this
    rank.
    """
    ranks, width = recording.ranks, recording.tree.top_k
    return [
        (np.bincount(column[column >= 0], minlength=width) / max(len(column), 1)).round(4).tolist()
        for column in ranks.T
    ]
