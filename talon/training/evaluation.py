"""How long a head's guesses hold: acceptance on real questions, without decoding once per tree.

Greedy decoding gives the same text with any head and any tree, so the target answers each question
once, in a batch. Then the head drafts along that known text, by the code that drafts when decoding:
only the target's verdict is looked up instead of computed. Leaves out: speed (benchmark.py).

    python train_draft.py --checkpoint_path F --evaluate QUESTIONS.jsonl --out DIR_OF_THE_HEAD
"""

from collections import deque

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_draft import DraftHead, Entries
from model import At, Transformer
from talon.decoder import CHUNKS, RoundStats
from talon.drafters import make_source
from talon.graphs import as_it_is
from talon.operators import choose_picks
from talon.sampling import GREEDY, Picks
from talon.training.batched import BatchedDecoder, Slot
from talon.training.conversations import Conversation
from talon.training.losses import Teacher, read_by_head
from talon.trees import Tree


def measure_acceptance(
    model: Transformer, head: DraftHead, prompts: list[list[int]], new_tokens: int,
    trees: list[Tree],
) -> dict:  # fmt: skip
    """What each tree of this head reaches on the target's own answers."""
    answered = answer_greedily(model, prompts, new_tokens)
    teacher = Teacher(model, head.config, max(len(row.ids) for row in answered))
    stats, differing = [RoundStats() for _ in trees], 0
    for row in tqdm(answered, unit="question", desc="drafting"):
        features, choice = teacher.run(row.ids)
        start = row.spans[0][0]
        again = choice[start - 1 : -1].tolist()
        differing += sum(a != b for a, b in zip(again, row.ids[start:], strict=True))
        for tree, counts in zip(trees, stats, strict=True):
            replay(head, tree, row, features, counts)
    return {
        "answer_tokens": sum(row.answer_tokens for row in answered),
        "not_the_choice_again": differing,
        "trees": [
            {
                "tree": tree.name,
                "questions": len(answered),
                "rounds": counts.rounds,
                "acceptance_length": round(counts.acceptance_length, 4),
                "accepted_by_depth": [
                    round(n / counts.rounds, 4) for n in counts.accepted_by_depth
                ],
            }
            for tree, counts in zip(trees, stats, strict=True)
        ],
    }


def answer_greedily(
    model: Transformer, prompts: list[list[int]], new_tokens: int
) -> list[Conversation]:
    """The prompts with the target's answers; an answer ends with the model's own end."""
    decoder = BatchedDecoder(model, len(prompts), max(map(len, prompts)) + new_tokens)
    texts = [Slot(n, deque(ids), start=len(ids)) for n, ids in enumerate(prompts)]
    waiting = iter(texts)
    slots = [next(waiting, None) for _ in range(decoder.batch)]
    with tqdm(total=len(texts), unit="question", desc="answers") as bar:
        while any(slots):
            for row, token in decoder.step(slots):
                slot = slots[row]
                slot.ids.append(token)
                if token in model.config.eos_ids or len(slot.ids) == slot.start + new_tokens:
                    slots[row] = next(waiting, None)
                    bar.update()
    return [Conversation(slot.ids, [(slot.start, len(slot.ids))]) for slot in texts]


@torch.inference_mode()
def replay(
    head: DraftHead, tree: Tree, row: Conversation, features: Tensor, stats: RoundStats
) -> None:
    """Draft along a known text; what is counted is what decoding would count."""
    ids, length = row.ids, row.spans[0][0]
    device = head.d2t.device
    # -1 is what no head guesses.
    known = torch.tensor(ids + [-1] * (tree.levels + 2), device=device)
    rows = len(ids) + tree.nodes + tree.draft_slots
    drafter = make_source(tree, head, rows, device, as_it_is)
    features, _ = read_by_head(features, head.config.target_dim)
    slots = torch.arange(rows, device=device)

    def learn(start: int, count: int) -> None:
        rows = torch.arange(start, start + count, device=device)
        last = rows.new_tensor([count - 1])
        entries = Entries(features, rows, known[rows + 1], rows[:1], last)
        drafter.learn(entries, At(rows[:1], slots))

    pick, most = choose_picks(Picks(device), device).set(GREEDY), CHUNKS["cuda"][-1]
    for start in range(0, length, most):  # as many as the operators of a GPU take
        learn(start, min(most, length - start))
    while length < len(ids) - 1:
        at = At(torch.tensor([length], device=device), slots)
        tokens, _, ancestors = drafter.propose(known[length : length + 1], at, pick)
        right = tokens == known[length + ancestors.sum(1) - 1]
        count = int((~(ancestors & ~right).any(1)).sum())
        emitted = min(count, len(ids) - 1 - length)
        stats.rounds += 1
        for index in range(emitted):
            stats.count(index)
        learn(length, emitted)
        length += emitted
