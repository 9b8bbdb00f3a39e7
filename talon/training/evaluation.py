"""How long a head's guesses hold: acceptance on real questions, without decoding them once per
tree.

Greedy decoding gives the same text with any head and any tree, so the target answers each question
once, in a batch, and its features are read off in one pass. Then the head drafts along that known
text, by the code that drafts when decoding: only the target's verdict is looked up instead of
computed. The counts are those of generate.py in fp32.

    python train_draft.py --checkpoint_path F --evaluate QUESTIONS.jsonl --out DIR_OF_THE_HEAD
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_draft import DraftHead, Entries
from model import At
from talon.decoder import RoundStats
from talon.drafters import EagleDrafter
from talon.sampling import Greedy
from talon.trees import Tree


@dataclass
class Text:
    """A question and the target's greedy answer."""

    prompt: list[int]
    answer: list[int]
    features: Tensor | None = None  # [prompt + answer, levels * C + C], as Teacher.run gives them

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


@torch.inference_mode()
def replay(head: DraftHead, tree: Tree, text: Text) -> RoundStats:
    """Draft along a known text; what is counted is what decoding would count."""
    ids, length, stats = text.ids, len(text.prompt), RoundStats()
    device = head.d2t.device
    known = torch.tensor(
        ids + [-1] * (tree.levels + 2), device=device
    )  # -1 is what no head guesses
    drafter = EagleDrafter(
        head, tree, len(ids) + tree.nodes + tree.draft_slots, lambda function: function
    )
    *captured, final = text.features.split(head.config.target_dim, dim=-1)
    features = captured if head.config.family == "eagle3" else [final]
    slots, pick = torch.arange(drafter.stage.cache.rows, device=device), Greedy()

    def learn(start: int, count: int) -> None:
        rows = torch.arange(start, start + count, device=device)
        last = rows.new_tensor([count - 1])
        entries = Entries(features, rows, known[rows + 1], rows[:1], last)
        drafter.learn(entries, At(rows[:1], slots))

    learn(0, length)
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
    return stats


def summarise(tree: Tree, parts: list[RoundStats]) -> dict:
    """Acceptance over all questions, and how often a guess at each depth was kept."""
    rounds = sum(part.rounds for part in parts)
    depth = max((len(part.accepted_by_depth) for part in parts), default=0)
    kept = [sum((part.accepted_by_depth + [0] * depth)[d] for part in parts) for d in range(depth)]
    per_text = sorted(part.acceptance_length for part in parts if part.rounds)
    return {
        "tree": tree.name,
        "questions": len(parts),
        "rounds": rounds,
        "acceptance_length": round(sum(part.emitted for part in parts) / max(rounds, 1), 4),
        "accepted_by_depth": [round(k / max(rounds, 1), 4) for k in kept],
        "median_of_questions": round(per_text[len(per_text) // 2], 4) if per_text else 0.0,
    }
