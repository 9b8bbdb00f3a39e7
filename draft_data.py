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

import torch
from torch import Tensor
from tqdm import tqdm

from model import KVCache, ModelConfig, Transformer, TransformerBlock, rope_table, rotate
from sampling import SamplingState, perturb
from tokenizer import Tokenizer, is_text

ROLES = {
    "system": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip
FIELD = re.compile(r"\{([a-z]+)\d?\}")
SAMPLING_POOL = 64  # sampled tokens come from this many best ones
FILLED_SHARE, OPENED_SHARE = 0.55, 0.33  # of the user turns; the rest the model invents alone
LOOP_LENGTH, LOOP_LIMIT = 4, 6  # an answer ends when one 4-gram has come this often
USER_TOP_P, USER_LIMIT = 0.95, 160  # sampled user turns
PASSAGE_TOKENS, SHORTEST_ANSWER = 120, 5
SHORTEST_TALK = 96  # tokens in which a template, a turn and an answer find room
BANK = Path(__file__).parent / "assets" / "prompts.json"


@dataclass(frozen=True)
class Conversation:
    """Token ids of a whole conversation and the spans [start, end) of its answers."""

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


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


def batched_block(
    layer: TransformerBlock, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor
) -> Tensor:
    """TransformerBlock.forward for one row of each of B sequences. x: [B, C]; mask: [B, R]; kv: [2,
    B * G, R, D]."""
    attention, batch, width = layer.attention, *mask.shape
    heads, groups, size = attention.n_head, attention.n_kv_head, attention.head_dim
    qkv = attention.wqkv(layer.attention_norm(x)).view(batch, heads + 2 * groups, size)
    q, k, v = qkv.split((heads, groups, groups), dim=1)
    row = torch.arange(batch, device=x.device)
    # Keys lie transposed, and products read the whole cache: anything strided would be copied
    # first.
    keys, values = kv[0].view(batch * groups, size, -1), kv[1]
    keys.view(batch, groups, size, -1)[row, :, :, slots] = rotate(k, rope).to(keys.dtype)
    values.view(batch, groups, -1, size)[row, :, slots] = v
    q = rotate(q, rope * size**-0.5).view(batch * groups, -1, size)
    scores = (
        torch.bmm(q, keys).view(batch, heads, width).masked_fill_(~mask[:, None], float("-inf"))
    )
    weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
    y = torch.bmm(weights.view(batch * groups, -1, width), values)
    x = x + attention.wo(y.view(batch, -1))
    return x + layer.feed_forward(layer.ffn_norm(x))


@dataclass(frozen=True)
class Recipe:
    """How the target talks to itself."""

    seed: int = 0
    batch: int = 128
    answer: int = 192  # tokens of an answer at most
    rows: int = 352  # tokens of a conversation at most
    greedy: float = 0.75  # share of the answers chosen greedily, as an evaluation is
    temperature: float = 0.7  # of the others


class BatchedDecoder:
    """B conversations in one batch, a row each; a finished one gives its row to the next at
    once."""

    def __init__(self, model: Transformer, batch: int, rows: int, seed: int) -> None:
        self.model, self.batch, self.rows, c = model, batch, rows, model.config
        weight = model.norm.weight
        self.device = weight.device
        self.cache = KVCache(c.n_layer, batch * c.n_kv_head, rows, c.head_dim, weight.dtype)
        self.cache.to(self.device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.sampling = SamplingState(self.device)
        self.sampling.seed.fill_(seed)
        self.sampling.top_k.fill_(SAMPLING_POOL)
        self.slots = torch.arange(rows, device=self.device)
        self.tokens = torch.arange(c.vocab_size, device=self.device)

    @torch.inference_mode()
    def step(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Run one token of every conversation; logits [B, V]."""
        at = torch.tensor(positions, device=self.device)
        mask = self.slots <= at[:, None]
        x = self.model.tok_embeddings(torch.tensor(tokens, device=self.device))
        for index, layer in enumerate(self.model.layers):
            x = batched_block(layer, x, self.table[:, at], at, mask, self.cache.layer(index))
        return self.model.output(self.model.norm(x))

    @torch.inference_mode()
    def choose(self, logits: Tensor, wanted: list[tuple[int, float, float, int]]) -> list[int]:
        """One token for each (row, temperature, top_p, noise counter); temperature 0 is greedy."""
        chosen = logits.max(dim=1).indices.tolist()
        result = {row: chosen[row] for row, *_ in wanted}
        sampled = [item for item in wanted if item[1] > 0]
        if sampled:
            rows, temperatures, top_ps, counters = zip(*sampled, strict=True)
            self.sampling.temperature = torch.tensor(temperatures, device=self.device)[:, None]
            self.sampling.top_p = torch.tensor(top_ps, device=self.device)[:, None]
            values, columns = perturb(
                logits[list(rows)], torch.tensor(counters, device=self.device), self.tokens,
                self.sampling, "filter", SAMPLING_POOL,
            )  # fmt: skip
            best = columns.gather(1, values.argmax(1, keepdim=True))[:, 0].tolist()
            result |= dict(zip(rows, best, strict=True))
        return [result[row] for row, *_ in wanted]


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


# --- conversations from a file --------------------------------------------------------------------


def tokenise(
    messages: list[dict], tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> Conversation | str:
    """Ids and answer spans of a conversation, or why it cannot be used.

    The chat template itself says where answers are: what it renders up to an answer is the prompt
    that decoding would start from, and the answer is what it appends, with the token that ends a
    turn.
    """
    stops = [tokenizer.decode([i], skip_special=False) for i in stop_ids]
    ids: list[int] = []
    spans, done = [], ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render_chat(messages[:index])
        full = tokenizer.render_chat(messages[: index + 1])
        content = message["content"].strip()
        if not (prompt.startswith(done) and full.startswith(prompt) and content):
            return "the template rewrites earlier turns, or an answer is empty"
        at = full.find(content, len(prompt))
        if at < 0:
            return "the template changes answers"
        end = at + len(content)
        end += next((len(stop) for stop in stops if full.startswith(stop, end)), 0)
        ids += tokenizer.encode(prompt[len(done) :], add_bos=False)
        answer = tokenizer.encode(full[len(prompt) : end], add_bos=False)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
        done = full[:end]
    return Conversation(ids, spans) if spans else "no answer"


def messages_of(row: dict) -> list[dict] | str:
    """The messages of a line in one form, or why it cannot be used."""
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list):
        return "neither messages nor conversations"
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            return "unknown role"
        if not is_text(content):
            return "half of a surrogate pair"
        messages.append({"role": ROLES[role], "content": content})
    while (
        messages and messages[0]["role"] == "assistant"
    ):  # ShareGPT has some that begin in the middle
        messages.pop(0)
    return messages


def conversation_of(
    row: dict, tokenizer: Tokenizer | None, stop_ids: tuple[int, ...]
) -> Conversation | str:
    """One line of a data file, ours or another's, or why it cannot be used."""
    if "ids" in row:
        ids, spans = row["ids"], row.get("spans")
        if not whole_numbers(ids):
            return "ids that are no list of whole numbers"
        if not (isinstance(spans, list) and all(whole_numbers(s) and len(s) == 2 for s in spans)):
            return "spans that are no list of [start, end]"
        return Conversation(ids, [(start, end) for start, end in spans])
    messages = messages_of(row)
    if isinstance(messages, str):
        return messages
    if tokenizer is None:
        raise ValueError(
            "the data is text, but no tokenizer lies beside the checkpoint: "
            "copy tokenizer.json there"
        )
    return tokenise(messages, tokenizer, stop_ids)


def whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON lines file; ValueError names the line that is none."""
    rows: list[dict] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
            reason = None if isinstance(row, dict) else "it is no object"
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            reason = str(error)
        if reason:
            raise ValueError(
                f"{path} line {number} is not a JSON object in UTF-8 ({reason}): "
                "one conversation a line is expected"
            )
        rows += [row] if row else []
    return rows


def read_conversations(
    path: Path, tokenizer: Tokenizer | None, config: ModelConfig, limit: int
) -> tuple[list[Conversation], Counter]:
    """What can be trained on, and a count of the reasons for what cannot."""
    kept, skipped = [], Counter()
    for row in read_lines(path):
        found = conversation_of(row, tokenizer, config.eos_ids)
        if isinstance(found, Conversation):
            found = unusable(found, config.vocab_size, limit) or found
        if isinstance(found, str):
            skipped[found] += 1
        else:
            kept.append(found)
    return kept, skipped


def unusable(row: Conversation, vocab_size: int, limit: int) -> str | None:
    """Why a conversation cannot be trained on, if so. The first token that can be guessed is the
    third."""
    if len(row.ids) > limit:
        return f"longer than {limit} tokens"
    if not row.ids or not 0 <= min(row.ids) <= max(row.ids) < vocab_size:
        return "ids outside the vocabulary"
    if not all(0 <= start <= end <= len(row.ids) for start, end in row.spans):
        return "spans outside the conversation"
    if not any(end > max(start, 2) for start, end in row.spans):
        return "no answer"
    return None
