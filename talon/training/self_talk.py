"""Conversations to train a draft head on: read from a file, or made by the target itself.

A head learns to guess one target, so the best text is the target's own. `generate` invents user
turns (sampled from the model after its own chat template, from openers, or filled from a bank of
prompts) and lets the model answer them, many conversations at a time: the target's usual forward
with one row per conversation. Answers that loop are cut, degenerate and repeated conversations
dropped. Leaves out: training (train_draft.py), tools, several answers a turn.

A line of the file it writes is one conversation: {"ids": [...], "spans": [[start, end], ...],
"temperature": t}, the spans being the answers' tokens. Any file of {"conversations"} (ShareGPT) or
{"messages"} is read too.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
"""

import itertools
import json
import random
import re
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from model import Transformer
from talon.prompts import DATA, read_lines
from talon.tokenizer import Tokenizer
from talon.training.batched import BatchedDecoder
from talon.training.conversations import Conversation, messages_of, read_conversations

FIELD = re.compile(r"\{([a-z]+)\d?\}")

FILLED_SHARE, OPENED_SHARE = 0.55, 0.33  # of the user turns; the rest the model invents alone

LOOP_LENGTH, LOOP_LIMIT = 4, 6  # an answer ends when one 4-gram has come this often

USER_TOP_P, USER_LIMIT = 0.95, 160  # sampled user turns

PASSAGE_TOKENS, SHORTEST_ANSWER = 120, 5

SHORTEST_TALK = 96  # tokens in which a template, a turn and an answer find room

BANK = DATA / "prompts.json"


class PromptBank:
    """User turns to sample from: openers that the model completes, and templates with things to
    fill in.

    `fill` maps a field's name to its values; "{item2}" takes a second value of `item`. "{passage}"
    is a piece of an answer that the model gave before.
    """

    def __init__(self, path: Path) -> None:
        bank = json.loads(path.read_text(encoding="utf-8"))
        self.openers: list[str] = bank["openers"]
        self.templates: list[str] = bank["templates"]
        self.fill: dict[str, list[str]] = bank["fill"]

    def filled(self, rng: random.Random, passages: list[str]) -> str:
        """One template with its fields drawn at random."""

        def draw(match: re.Match) -> str:
            if match[1] == "passage":
                return rng.choice(passages) if passages else rng.choice(self.fill["facts"])
            return rng.choice(self.fill[match[1]])

        return FIELD.sub(draw, rng.choice(self.templates))


@dataclass
class Slot:
    """One conversation under way: ids in `queue` are forced, the next ones are the model's
    choice."""

    number: int
    queue: deque[int]
    sampled_turn: bool  # the user turn is still being sampled
    temperature: float  # of the answer
    ids: list[int] = field(default_factory=list)
    turn: int = 0  # where the sampled part of the user turn begins
    start: int = 0  # where the answer begins
    seen: Counter = field(default_factory=Counter)

    def loops(self, limit: int) -> bool:
        """Has the last 4-gram of the answer come `limit` times?"""
        if len(self.ids) - self.start < LOOP_LENGTH:
            return False
        gram = tuple(self.ids[-LOOP_LENGTH:])
        self.seen[gram] += 1
        return self.seen[gram] >= limit


@dataclass(frozen=True)
class Recipe:
    """How the target talks to itself."""

    seed: int = 0
    batch: int = 128
    answer: int = 192  # tokens of an answer at most
    rows: int = 352  # tokens of a conversation at most
    greedy: float = 0.75  # share of the answers chosen greedily, as an evaluation is
    temperature: float = 0.7  # of the others


class SelfTalk:
    """Invents conversations and lets the target answer them."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        bank: PromptBank,
        recipe: Recipe,
        given: list[list[int]] | None = None,
    ) -> None:
        self.tokenizer, self.bank, self.recipe, self.given = tokenizer, bank, recipe, given
        self.decoder = BatchedDecoder(model, recipe.batch, recipe.rows, recipe.seed)
        self.stop_ids = set(model.config.eos_ids)
        marker = "\x00"
        before, _, after = tokenizer.render_chat([{"role": "user", "content": marker}]).partition(
            marker
        )
        self.before = tokenizer.encode(before, add_bos=False)
        self.after = tokenizer.encode(after, add_bos=False)
        self.prompts: set[tuple[int, ...]] = set()
        self.answers: set[tuple[int, ...]] = set()
        self.passages: list[str] = []
        self.dropped: Counter = Counter()

    def remember(self, row: dict) -> None:
        """Count a finished conversation against repetition, and keep a piece of it as a passage."""
        (start, end), ids = row["spans"][-1], row["ids"]
        self.prompts.add(tuple(ids[:start]))
        self.answers.add(tuple(ids[start : start + 32]))
        if end - start > PASSAGE_TOKENS and len(self.passages) < 2000:
            text = self.tokenizer.decode(ids[start : start + PASSAGE_TOKENS])
            self.passages.append(text[: text.rfind(".") + 1] or text)

    def open(self, number: int) -> Slot | None:
        """A new conversation; everything random about it follows from the seed, its number and what
        was said before. None when the file of prompts is used up."""
        rng = random.Random(f"{self.recipe.seed}/{number}")
        temperature = 0.0 if rng.random() < self.recipe.greedy else self.recipe.temperature
        if self.given is not None:
            if number >= len(self.given):
                return None
            ids = self.given[number]
            return Slot(number, deque(ids), False, temperature, start=len(ids))
        kind = rng.random()
        ids = self.new_prompt(rng) if kind < FILLED_SHARE else None
        if ids is not None:
            self.prompts.add(tuple(ids))
            return Slot(number, deque(ids), False, temperature, start=len(ids))
        opener = rng.choice(self.bank.openers) if kind < FILLED_SHARE + OPENED_SHARE else ""
        ids = self.before + self.tokenizer.encode(opener, add_bos=False)
        return Slot(number, deque(ids), True, temperature, turn=len(self.before))

    def new_prompt(self, rng: random.Random) -> list[int] | None:
        """One filled from the bank that was not there before; None if 20 tries find none."""
        for _ in range(20):
            text = self.bank.filled(rng, self.passages)
            ids = self.tokenizer.encode_chat([{"role": "user", "content": text}])
            if tuple(ids) not in self.prompts and len(ids) <= self.recipe.rows - self.recipe.answer:
                return ids
        return None

    def wanted(self, row: int, slot: Slot) -> tuple[int, float, float, int]:
        counter = slot.number * self.recipe.rows + len(slot.ids)
        return (
            (row, 1.0, USER_TOP_P, counter)
            if slot.sampled_turn
            else (row, slot.temperature, 1.0, counter)
        )

    def advance(self, slot: Slot, token: int) -> dict | str | None:
        """Take the model's choice. Returns the finished conversation, or why it is dropped, or
        None."""
        if slot.sampled_turn:
            return self.advance_turn(slot, token)
        slot.ids.append(token)
        length = len(slot.ids) - slot.start
        ended = token in self.stop_ids
        full = length == self.recipe.answer or len(slot.ids) == self.recipe.rows
        if not (ended or full or slot.loops(LOOP_LIMIT)):
            return None
        if length < SHORTEST_ANSWER:
            return "short answers"
        if tuple(slot.ids[slot.start : slot.start + 32]) in self.answers:
            return "repeated answers"
        return {
            "number": slot.number, "ids": slot.ids, "spans": [[slot.start, len(slot.ids)]],
            "temperature": slot.temperature,
        }  # fmt: skip

    def advance_turn(self, slot: Slot, token: int) -> str | None:
        """A token of a sampled user turn; its end, as the template writes it, starts the answer."""
        length = len(slot.ids) - slot.turn
        if token not in self.stop_ids:
            slot.ids.append(token)
            room = self.recipe.rows - self.recipe.answer - slot.turn - len(self.after)
            return "endless user turns" if length >= min(USER_LIMIT, room) else None
        turn = slot.ids[slot.turn :]
        if (
            length < 3
            or len(set(turn)) < 0.4 * length
            or tuple(slot.ids + self.after) in self.prompts
        ):
            return "degenerate user turns"
        slot.sampled_turn = False
        slot.queue.extend(self.after)
        slot.start = len(slot.ids) + len(self.after)
        self.prompts.add(tuple(slot.ids + self.after))
        return None

    def run(self, first: int) -> Iterator[dict]:
        """Finished conversations, numbered from `first` on; without end unless the prompts are
        given."""
        numbers = itertools.count(first)
        slots = [self.open(next(numbers)) for _ in range(self.recipe.batch)]
        while any(slots):
            for row, token in self.step(slots):
                slot = slots[row]
                done = self.advance(slot, token)
                if done is None:
                    continue
                if isinstance(done, dict):
                    self.remember(done)
                    yield done
                else:
                    self.dropped[done] += 1
                slots[row] = self.open(next(numbers))

    def step(self, slots: list[Slot | None]) -> list[tuple[int, int]]:
        """Run a token of every conversation; (row, token) for those whose next token is the model's
        to choose."""
        for slot in slots:
            if slot and slot.queue:
                slot.ids.append(slot.queue.popleft())
        last = [(s.ids[-1], len(s.ids) - 1) if s else (0, 0) for s in slots]
        logits = self.decoder.step(*zip(*last, strict=True))
        wanted = [self.wanted(row, s) for row, s in enumerate(slots) if s and not s.queue]
        chosen = self.decoder.choose(logits, wanted)
        return [(row, token) for (row, *_), token in zip(wanted, chosen, strict=True)]


def prepare_data(
    source: str,
    out: Path,
    model: Transformer,
    tokenizer: Tokenizer | None,
    recipe: Recipe,
    answer_tokens: int,
    limit: int,
    regenerate: bool = False,
) -> list[Conversation]:
    """The conversations to train on: read from the file `source`, or made by the target (`self`, or
    `regenerate` with the first turns of the file) and kept in `out`, where a later call goes on
    with them."""
    path = Path(source)
    if source == "self" or regenerate:
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError(
                "the target can only talk to itself with a tokenizer that has a chat template: "
                "give --data FILE"
            )
        if recipe.rows < SHORTEST_TALK:
            raise ValueError(
                f"max_length {limit} leaves the target no room to talk: give at least "
                f"{SHORTEST_TALK}, or --data FILE without --regenerate"
            )
        given = read_prompts(path, tokenizer, recipe) if regenerate else None
        talk = SelfTalk(model, tokenizer, PromptBank(BANK), recipe, given)
        # Answers to another file, or to what this one was, are not gone on with.
        mark = f"regenerated_{zlib.crc32(path.read_bytes()):08x}" if regenerate else "self"
        path = out / f"{mark}.jsonl"
        make_conversations(talk, path, answer_tokens)
    rows, skipped = read_conversations(path, tokenizer, model.config, limit)
    for reason, count in skipped.items():
        print(f"{count} conversations skipped: {reason}", file=sys.stderr)
    if not rows:
        raise ValueError(
            f"{path} holds no conversation to train on: each needs an answer and at most "
            f"{limit} tokens"
        )
    return rows


def read_prompts(path: Path, tokenizer: Tokenizer, recipe: Recipe) -> list[list[int]]:
    """The ids of the first turns of a file's conversations, those that leave room for an answer."""
    prompts = []
    for row in read_lines(path):
        messages = messages_of(row)
        if isinstance(messages, str) or "user" not in [m["role"] for m in messages]:
            continue
        first = [m["role"] for m in messages].index("user")
        ids = tokenizer.encode_chat(messages[: first + 1])
        if len(ids) <= recipe.rows - recipe.answer:
            prompts.append(ids)
    if not prompts:
        raise ValueError(
            f"{path} holds no user turn that fits: give conversations with a role user or human"
        )
    return prompts


def make_conversations(talk: SelfTalk, path: Path, answer_tokens: int) -> None:
    """Append conversations to `path` until it holds `answer_tokens` of answers. An interrupted file
    is taken up again; a line that was cut short is dropped."""
    total, first = 0, 0
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        for row in read_lines(path):
            talk.remember(row)
            total += row["spans"][-1][1] - row["spans"][-1][0]
            first = max(first, row["number"] + 1)
    bar = tqdm(total=answer_tokens, initial=total, unit="token", desc="answers")
    with path.open("a", encoding="utf-8") as file, bar:
        for row in talk.run(first) if total < answer_tokens else ():
            file.write(json.dumps(row) + "\n")
            start, end = row["spans"][-1]
            bar.update(end - start)
            total += end - start
            if total >= answer_tokens:
                break
