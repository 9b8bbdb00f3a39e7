"""Conversations that the target makes itself: it invents user turns and answers them.

User turns are sampled from the model after its own chat template, under the system prompts and
openers of about two dozen topics, or filled from a bank of prompts, or they are the first turns of
a file. Many users speak twice. Answers that loop and what is repeated are dropped. Leaves out: the
batch (batched.py), reading conversations (conversations.py), several answers a turn.

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
# Of the user turns; the rest the model invents from an opener alone.
FILLED_SHARE, SEEDED_SHARE = 0.4, 0.5
SYSTEM_SHARE = 0.3  # of the seeded turns are answered under their system prompt too
SECOND_SHARE, SECOND_ROOM = 0.4, 96  # of the whole answers with that many tokens left behind them
SHORTEST_ROOM = 48  # tokens that are left for an answer
GREEDY_SHARE, TEMPERATURE = 0.75, 0.7  # of the answers, as an evaluation is; of the others
USER_LIMIT = 160  # tokens of a sampled user turn
LOOP_LENGTH, LOOP_LIMIT = 4, 6  # an answer in which one 4-gram comes this often is dropped
PASSAGE_TOKENS, SHORTEST_ANSWER = 120, 5
SHORTEST_TALK = 96  # tokens in which a template, a turn and an answer find room


@dataclass(frozen=True)
class TalkConfig:
    """How much the target says to itself."""

    answer_tokens: int
    batch: int = 128  # conversations at a time
    seed: int = 0
    length: int = 448  # tokens of a conversation at most

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


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def finished(slot: Slot) -> dict:
    """The conversation up to its last whole answer; {} if it has none."""
    if not slot.spans:
        return {}
    return {
        "number": slot.number, "ids": slot.ids[: slot.spans[-1][1]], "spans": slot.spans,
        "temperature": slot.temperature,
    }  # fmt: skip


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
            before = self.before_turn([])
        except ValueError:
            refusal = "the target's chat template refuses a conversation that the user starts"
            raise ValueError(f"{refusal}: give --data FILE without --regenerate") from None
        prompt = self.tokenizer.render_chat([said("user", "\0")])
        around = tokenizer.encode(before + prompt.rpartition("\0")[2], add_bos=False)
        self.longest_turn = min(USER_LIMIT, config.longest_prompt - len(around))
        self.latest_turn = config.length - SHORTEST_ROOM  # where a user must have come to an end
        self.seeds = [seed for seed in self.bank["seeds"] if self.has_room(seed)]
        self.prompts: set[tuple[int, ...]] = set()
        self.answers: set[tuple[int, ...]] = set()
        self.passages: list[str] = []

    def remember(self, row: dict) -> None:
        """Count a finished conversation against repetition, and keep a piece of it as a passage."""
        (start, end), ids = row["spans"][0], row["ids"]
        self.prompts.add(tuple(ids[:start]))
        self.answers |= {tuple(ids[first : first + 32]) for first, _ in row["spans"]}
        if end - start > PASSAGE_TOKENS and len(self.passages) < 2000:
            text = self.tokenizer.decode(ids[start : start + PASSAGE_TOKENS])
            self.passages.append(text[: text.rfind(".") + 1] or text)

    def before_turn(self, messages: list[dict]) -> str:
        """What the template renders before a user's next turn; ValueError if it refuses one."""
        return self.tokenizer.render_chat([*messages, said("user", "\0")]).partition("\0")[0]

    def has_room(self, seed: dict) -> bool:
        """Does the template take this system prompt, and leave a user room behind it?"""
        try:
            before = self.before_turn([said("system", seed["system"])])
        except ValueError:
            return False
        return len(self.tokenizer.encode(before, False)) + self.longest_turn <= self.latest_turn

    def open(self, number: int) -> Slot | None:
        """A new conversation, or None when the given prompts are used up. Everything random about
        it follows from the seed, its number and what was said before."""
        rng = random.Random(f"{self.config.seed}/{number}")
        temperature = 0.0 if rng.random() < GREEDY_SHARE else TEMPERATURE
        share, text = rng.random(), None
        if self.given is not None:
            if number >= len(self.given):
                return None
            return self.ask(Slot(number, deque(), temperature), self.given[number])
        if share < FILLED_SHARE and (text := self.new_prompt(rng)):
            messages = [said("user", text)]
            slot = Slot(number, deque(), temperature, messages=messages)
            return self.ask(slot, self.tokenizer.encode_chat(messages))
        seed = rng.choice(self.seeds) if self.seeds and share < FILLED_SHARE + SEEDED_SHARE else {}
        opener = rng.choice(seed.get("openers", self.bank["openers"]))
        system = [said("system", seed["system"])] if seed else []
        # The model writes a space itself, with the word after it.
        before = self.before_turn(system).rstrip(" ")
        before, ids = (
            self.tokenizer.encode(text, add_bos=False) for text in (before, before + opener)
        )
        kept = system if rng.random() < SYSTEM_SHARE else []
        return Slot(number, deque(ids), temperature, turn=shared(before, ids), messages=kept)

    def ask(self, slot: Slot, prompt: list[int]) -> Slot:
        """Go on with the prompt of an answer; what it begins with alike is in the cache already."""
        if not slot.spans:
            self.prompts.add(tuple(prompt))
        kept = shared(slot.ids, prompt)
        slot.ids, slot.queue, slot.start = prompt[:kept], deque(prompt[kept:]), len(prompt)
        return slot

    def new_prompt(self, rng: random.Random) -> str | None:
        """One filled from the bank that was not there before; None if 20 tries find none."""
        for _ in range(20):
            text = fill_template(self.bank, rng, self.passages)
            ids = self.tokenizer.encode_chat([said("user", text)])
            if tuple(ids) not in self.prompts and len(ids) <= self.config.longest_prompt:
                return text
        return None

    def advance(self, slot: Slot, token: int) -> dict | None:
        """Take the model's choice. The finished conversation, {} to drop it; None: it goes on."""
        if slot.start is None:
            return self.advance_turn(slot, token)
        slot.ids.append(token)
        if loops(slot):
            return finished(slot)
        length = len(slot.ids) - slot.start
        full = length == self.config.longest_answer or len(slot.ids) == self.config.length
        if not (token in self.stop_ids or full):
            return None
        if length < SHORTEST_ANSWER or tuple(slot.ids[slot.start :][:32]) in self.answers:
            return finished(slot)
        slot.spans.append([slot.start, len(slot.ids)])
        return None if self.goes_on(slot) else finished(slot)

    def goes_on(self, slot: Slot) -> bool:
        """Let the user speak once more, if decoding would see the ids of this conversation."""
        room = self.config.length - len(slot.ids)
        chance = random.Random(f"{self.config.seed}/{slot.number}/second").random()
        whole = slot.messages and slot.ids[-1] in self.stop_ids and len(slot.spans) == 1
        if not whole or room < SECOND_ROOM or chance >= SECOND_SHARE:
            return False
        answer = self.tokenizer.decode(slot.ids[slot.start :])
        messages = [*slot.messages, said("assistant", answer)]
        try:
            ids = self.tokenizer.encode(self.before_turn(messages).rstrip(" "), add_bos=False)
        except ValueError:  # a template for one turn
            return False
        if ids[: len(slot.ids)] != slot.ids:
            return False
        slot.ids.pop()  # it has not been read yet
        slot.queue, slot.turn = deque(ids[len(slot.ids) :]), len(ids)
        slot.start, slot.messages = None, messages
        slot.seen.clear()
        return True

    def advance_turn(self, slot: Slot, token: int) -> dict | None:
        """A token of a sampled user turn; its end makes it the prompt that decoding would see."""
        turn = slot.ids[slot.turn :]
        if token not in self.stop_ids:
            slot.ids.append(token)
            long = len(turn) >= self.longest_turn or len(slot.ids) >= self.latest_turn
            return finished(slot) if long else None
        slot.messages.append(said("user", self.tokenizer.decode(turn).strip()))
        prompt = self.tokenizer.encode_chat(slot.messages)
        degenerate = len(turn) < 3 or len(set(turn)) < 0.4 * len(turn)
        room = self.config.longest_prompt
        if slot.spans:
            room = self.latest_turn
            degenerate |= shared(slot.ids, prompt) < slot.spans[-1][1]
        if degenerate or tuple(prompt) in self.prompts or len(prompt) > room:
            return finished(slot)
        self.ask(slot, prompt)
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
            total += sum(end - start for start, end in row["spans"])
            first = max(first, row["number"] + 1)
    bar = tqdm(total=config.answer_tokens, initial=total, unit="token", desc="answers")
    with path.open("a", encoding="utf-8") as file, bar:
        conversations = talk.run(first)
        while total < config.answer_tokens and (row := next(conversations, None)):
            file.write(json.dumps(row) + "\n")
            tokens = sum(end - start for start, end in row["spans"])
            bar.update(tokens)
            total += tokens
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
