"""Conversations that the target makes itself: it invents user turns and answers them.

User turns are sampled from the model after its own chat template, from openers, or filled from a
bank of prompts, or they are the first turns of a file. Answers that loop are cut, degenerate and
repeated conversations dropped. Leaves out: the batch (batched.py), reading conversations
(conversations.py), several answers a turn.

    python train_draft.py --checkpoint_path F --head eagle1 --data self --out DIR
"""

import itertools
import json
import random
import re
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from model import Transformer
from talon.prompts import DATA, read_lines
from talon.tokenizer import Tokenizer
from talon.training.batched import BatchedDecoder, Slot
from talon.training.conversations import need_template, read_messages, shared

BANK = DATA / "prompts.json"
FIELD = re.compile(r"\{([a-z]+)\d?\}")
FILLED_SHARE, OPENED_SHARE = 0.55, 0.33  # of the user turns; the rest the model invents alone
GREEDY_SHARE, TEMPERATURE = 0.75, 0.7  # of the answers, as an evaluation is; of the others
USER_LIMIT = 160  # tokens of a sampled user turn
LOOP_LENGTH, LOOP_LIMIT = 4, 6  # an answer ends when one 4-gram has come this often
PASSAGE_TOKENS, SHORTEST_ANSWER = 120, 5
SHORTEST_TALK = 96  # tokens in which a template, a turn and an answer find room


@dataclass(frozen=True)
class TalkConfig:
    """How much the target says to itself."""

    answer_tokens: int
    batch: int = 128  # conversations at a time
    seed: int = 0
    length: int = 352  # tokens of a conversation at most

    @property
    def longest_answer(self) -> int:
        return min(192, self.length // 2)

    @property
    def longest_prompt(self) -> int:
        return self.length - self.longest_answer


def fill_template(bank: dict, rng: random.Random, passages: list[str]) -> str:
    """A prompt of the bank with its fields drawn at random: "{item2}" is a second value of `item`,
    "{passage}" a piece of an answer that the model gave before."""

    def draw(match: re.Match) -> str:
        if match[1] == "passage":
            return rng.choice(passages or bank["fill"]["facts"])
        return rng.choice(bank["fill"][match[1]])

    return FIELD.sub(draw, rng.choice(bank["templates"]))


def loops(slot: Slot) -> bool:
    """Has the answer's last 4-gram come too often?"""
    gram = tuple(slot.ids[slot.start :][-LOOP_LENGTH:])
    slot.seen[gram] += 1
    return len(gram) == LOOP_LENGTH and slot.seen[gram] >= LOOP_LIMIT


class SelfTalk:
    """Invents conversations, or takes the `given` prompts, and lets the target answer them."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: TalkConfig,
        given: list[list[int]] | None = None,
    ) -> None:
        self.tokenizer, self.config, self.given = tokenizer, config, given
        self.bank = json.loads(BANK.read_text(encoding="utf-8"))
        self.decoder = BatchedDecoder(model, config.batch, config.length, config.seed)
        self.stop_ids = set(model.config.eos_ids)
        try:
            rendered = tokenizer.render_chat([{"role": "user", "content": "\0"}])
        except ValueError:
            refusal = "the target's chat template refuses a conversation that the user starts"
            raise ValueError(f"{refusal}: give --data FILE without --regenerate") from None
        self.before, _, after = rendered.partition("\0")
        around = tokenizer.encode(self.before + after, add_bos=False)
        self.longest_turn = min(USER_LIMIT, config.longest_prompt - len(around))
        self.prompts: set[tuple[int, ...]] = set()
        self.answers: set[tuple[int, ...]] = set()
        self.passages: list[str] = []

    def remember(self, row: dict) -> None:
        """Count a finished conversation against repetition, and keep a piece of it as a passage."""
        (start, end), ids = row["spans"][-1], row["ids"]
        self.prompts.add(tuple(ids[:start]))
        self.answers.add(tuple(ids[start : start + 32]))
        if end - start > PASSAGE_TOKENS and len(self.passages) < 2000:
            text = self.tokenizer.decode(ids[start : start + PASSAGE_TOKENS])
            self.passages.append(text[: text.rfind(".") + 1] or text)

    def open(self, number: int) -> Slot | None:
        """A new conversation, or None when the given prompts are used up. Everything random about
        it follows from the seed, its number and what was said before."""
        rng = random.Random(f"{self.config.seed}/{number}")
        temperature = 0.0 if rng.random() < GREEDY_SHARE else TEMPERATURE
        share, ids = rng.random(), None
        if self.given is not None:
            if number >= len(self.given):
                return None
            ids = self.given[number]
        elif share < FILLED_SHARE:
            ids = self.new_prompt(rng)
        if ids is not None:
            self.prompts.add(tuple(ids))
            return Slot(number, deque(ids), temperature, start=len(ids))
        opener = rng.choice(self.bank["openers"]) if share < FILLED_SHARE + OPENED_SHARE else ""
        # The model writes a space itself, with the word after it.
        before, ids = (
            self.tokenizer.encode(text.rstrip(" "), add_bos=False)
            for text in (self.before, self.before + opener)
        )
        return Slot(number, deque(ids), temperature, turn=shared(before, ids))

    def new_prompt(self, rng: random.Random) -> list[int] | None:
        """One filled from the bank that was not there before; None if 20 tries find none."""
        for _ in range(20):
            text = fill_template(self.bank, rng, self.passages)
            ids = self.tokenizer.encode_chat([{"role": "user", "content": text}])
            if tuple(ids) not in self.prompts and len(ids) <= self.config.longest_prompt:
                return ids
        return None

    def advance(self, slot: Slot, token: int) -> dict | None:
        """Take the model's choice. The finished conversation, {} to drop it; None: it goes on."""
        if slot.start is None:
            return self.advance_turn(slot, token)
        slot.ids.append(token)
        length = len(slot.ids) - slot.start
        full = length == self.config.longest_answer or len(slot.ids) == self.config.length
        if not (token in self.stop_ids or full or loops(slot)):
            return None
        if length < SHORTEST_ANSWER or tuple(slot.ids[slot.start :][:32]) in self.answers:
            return {}
        return {
            "number": slot.number, "ids": slot.ids, "spans": [[slot.start, len(slot.ids)]],
            "temperature": slot.temperature,
        }  # fmt: skip

    def advance_turn(self, slot: Slot, token: int) -> dict | None:
        """A token of a sampled user turn; its end makes it the prompt that decoding would see."""
        turn = slot.ids[slot.turn :]
        if token not in self.stop_ids:
            slot.ids.append(token)
            return {} if len(turn) >= self.longest_turn else None
        content = self.tokenizer.decode(turn).strip()
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": content}])
        degenerate = len(turn) < 3 or len(set(turn)) < 0.4 * len(turn)
        if degenerate or tuple(prompt) in self.prompts or len(prompt) > self.config.longest_prompt:
            return {}
        self.prompts.add(tuple(prompt))
        kept = shared(slot.ids, prompt)  # their keys and values are in the cache already
        slot.ids, slot.queue, slot.start = prompt[:kept], deque(prompt[kept:]), len(prompt)
        return None

    def run(self, first: int) -> Iterator[dict]:
        """Finished conversations, numbered from `first` on; only given prompts come to an end."""
        numbers = itertools.count(first)
        slots = [self.open(next(numbers)) for _ in range(self.decoder.batch)]
        while any(slots):
            for index, token in self.decoder.step(slots):
                done = self.advance(slots[index], token)
                if done is None:
                    continue
                if done:
                    self.remember(done)
                    yield done
                slots[index] = self.open(next(numbers))


def make_conversations(
    model: Transformer, tokenizer: Tokenizer | None, config: TalkConfig, out: Path,
    turns: Path | None = None,
) -> Path:  # fmt: skip
    """The file in `out` of what the target said, to itself or after the first turns of a file. An
    interrupted file is taken up again; a line that was cut short is dropped."""
    tokenizer = need_template(tokenizer)
    if config.length < SHORTEST_TALK:
        few = f"max_length {config.length} leaves the target no room to talk"
        raise ValueError(f"{few}: give at least {SHORTEST_TALK}")
    given = read_first_turns(turns, tokenizer, config) if turns else None
    talk = SelfTalk(model, tokenizer, config, given)
    # Answers to another file, or to what this one was, are not gone on with.
    mark = f"regenerated_{zlib.crc32(turns.read_bytes()):08x}" if turns else "self"
    path, total, first = out / f"{mark}.jsonl", 0, 0
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        for row in read_lines(path):
            talk.remember(row)
            total += row["spans"][-1][1] - row["spans"][-1][0]
            first = max(first, row["number"] + 1)
    bar = tqdm(total=config.answer_tokens, initial=total, unit="token", desc="answers")
    with path.open("a", encoding="utf-8") as file, bar:
        conversations = talk.run(first)
        while total < config.answer_tokens and (row := next(conversations, None)):
            file.write(json.dumps(row) + "\n")
            start, end = row["spans"][-1]
            bar.update(end - start)
            total += end - start
    return path


def read_first_turns(path: Path, tokenizer: Tokenizer, config: TalkConfig) -> list[list[int]]:
    """The ids of the first turns of a file's conversations, those that leave room for an answer."""
    prompts = []
    for line in read_lines(path):
        messages = read_messages(line)
        roles = [] if isinstance(messages, str) else [m["role"] for m in messages]
        if "user" in roles:
            with suppress(ValueError):  # the template refuses it
                prompts.append(tokenizer.encode_chat(messages[: roles.index("user") + 1]))
    prompts = [ids for ids in prompts if len(ids) <= config.longest_prompt]
    if not prompts:
        raise ValueError(f"{path} holds no user turn that fits: give roles user or human")
    return prompts
