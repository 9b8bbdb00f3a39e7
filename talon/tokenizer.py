"""Text to token ids and back: two tokenizer formats behind one face, chat templates, streaming.

Reads the files beside a checkpoint: tokenizer.json (the first choice, being the form Hugging Face
runs) or sentencepiece's tokenizer.model, with tokenizer_config.json, special_tokens_map.json,
added_tokens.json and chat_template.jinja where present. Ids are those Hugging Face gives.
Leaves out: tiktoken files (LLaMA-3 ships tokenizer.json as well), batches, offsets, and Hugging
Face's `clean_up_tokenization_spaces`, which rewrites text that a stream has already shown.

    python -c "from tokenizer import load_tokenizer; print(load_tokenizer('DIR').encode('Hello'))"
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken
from tokenizers import Tokenizer as JsonTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")

SPACE = "\u2581"  # sentencepiece writes a space so

NO_DUMMY_PREFIX = (
    b"\x1a\x02\x18\x00"  # appended to a model: normalizer_spec { add_dummy_prefix: false }
)

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

BAD_BYTE = re.compile("[\udc80-\udcff]")  # a bad byte after the error handler "surrogateescape"


# --- settings beside the tokenizer file -----------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the JSON files around a tokenizer say."""

    named: dict[str, str]  # "bos_token" -> "<s>", ...
    special: tuple[str, ...]  # every string declared special, the named ones included
    added: dict[int, AddedToken]
    add_bos: bool | None  # None: not said, the tokenizer file's own rule holds
    legacy: bool  # sentencepiece: a dummy space before each text between special tokens
    templates: dict[str, str]  # chat templates by name


def read_settings(directory: Path) -> Settings:
    config = read_json(directory / "special_tokens_map.json")
    config |= read_json(directory / "tokenizer_config.json")
    named = {name: content_of(config[name]) for name in NAMED_TOKENS if config.get(name)}
    extra = map(content_of, config.get("additional_special_tokens") or [])
    special = (*named.values(), *extra)
    return Settings(
        named=named,
        special=special,
        added=read_added_tokens(directory, config, special),
        add_bos=config.get("add_bos_token"),
        legacy=config.get("legacy") is not False,
        templates=read_templates(directory, config),
    )


def read_json(path: Path) -> dict:
    """The object in a JSON file, {} when the file is absent; ValueError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({one_line(error)}); fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, expected an object; fetch it again")
    return value


def content_of(token: str | dict) -> str:
    """Special tokens are written as plain strings or as objects with flags."""
    return token["content"] if isinstance(token, dict) else token


def read_added_tokens(
    directory: Path, config: dict, special: tuple[str, ...]
) -> dict[int, AddedToken]:
    """Added tokens by id: from added_tokens.json, then tokenizer_config.json, which has flags."""
    older = read_json(directory / "added_tokens.json")
    added = {i: AddedToken(s, normalized=False, special=s in special) for s, i in older.items()}
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        flags = {flag: bool(token.get(flag)) for flag in TOKEN_FLAGS}
        added[int(i)] = AddedToken(token["content"], **flags)
    return added


def read_templates(directory: Path, config: dict) -> dict[str, str]:
    """Chat templates by name; a file chat_template.jinja wins over tokenizer_config.json."""
    if (path := directory / "chat_template.jinja").is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = config.get("chat_template") or []
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found}


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# --- the two file formats -------------------------------------------------------------------------
# Both have: size, special (ids), strip (spaces to drop at the start of a text), errors (for UTF-8),
# encode(text), prefix(), token_id(string), and piece(id): the bytes one token adds to a text.


class JsonFile:
    """tokenizer.json through the `tokenizers` library."""

    def __init__(self, path: Path, settings: Settings) -> None:
        try:
            self.model = JsonTokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} cannot be read ({one_line(error)}); fetch it again") from None
        self.model.no_truncation()  # the file may carry a training set-up that would cut prompts
        self.model.no_padding()
        self.add_configured(path, settings)
        added = self.model.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.size = 1 + max(self.model.get_vocab(with_added_tokens=True).values(), default=-1)
        self.read_decoder(path)

    def add_configured(self, path: Path, settings: Settings) -> None:
        """Add what only the other files declare; ValueError if an id would not be theirs."""
        known = {token.content for token in self.model.get_added_tokens_decoder().values()}
        for i, token in sorted(settings.added.items()):
            if token.content in known:
                continue
            self.model.add_tokens([token])
            if (got := self.token_id(token.content)) != i:
                raise ValueError(
                    f"{path} gives {token.content!r} the id {got}, the files beside it {i}; "
                    "take all files from one release"
                )
        for name in settings.special:
            if name not in known and self.token_id(name) is not None:
                self.model.add_special_tokens([name])

    def read_decoder(self, path: Path) -> None:
        """Learn how a token becomes text, to do it token by token; ValueError for unknown steps."""
        state = {"type": "none"}
        if self.model.decoder is not None:
            state = json.loads(self.model.decoder.__getstate__())
        self.replacements: list[tuple[str, str]] = []
        self.alphabet: dict[str, int] = {}
        self.byte_fallback, self.before, self.strip = False, "", 0
        for step in state.get("decoders", [state]):
            match step:
                case {"type": "ByteLevel"}:
                    self.alphabet = byte_level_alphabet()
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    self.replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                    self.strip = start
                case {"type": "ByteFallback"}:
                    self.byte_fallback = True
                case {"type": "none"}:  # whole words: one space between two
                    self.before, self.strip = " ", 1
                case {"type": "Fuse"}:
                    pass
                case _:
                    raise ValueError(
                        f"{path} decodes with {json.dumps(step)}, not supported; supported are "
                        "ByteLevel, or LLaMA's Replace, ByteFallback, Fuse, Strip"
                    )
        self.errors = "replace" if self.alphabet else "surrogateescape"

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids

    def prefix(self) -> list[int]:
        """Ids that the file's post-processor puts before every text."""
        ids: list[int] = []
        if self.model.post_processor is not None:
            state = json.loads(self.model.post_processor.__getstate__())
            for step in state.get("processors", [state]):
                for item in itertools.takewhile(
                    lambda x: "SpecialToken" in x, step.get("single", [])
                ):
                    ids += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        return ids

    def token_id(self, token: str) -> int | None:
        return self.model.token_to_id(token)

    def piece(self, i: int) -> bytes:
        token = self.model.id_to_token(i)
        if token is None:  # a model's vocabulary may be padded beyond the tokenizer's
            return b""
        if self.alphabet and all(c in self.alphabet for c in token):
            return bytes(self.alphabet[c] for c in token)
        if self.byte_fallback and (match := BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return (self.before + token).encode()


class SentencePieceFile:
    """tokenizer.model through the `sentencepiece` library, plus Hugging Face's added tokens."""

    errors = "surrogateescape"

    def __init__(self, path: Path, settings: Settings) -> None:
        data = path.read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
            raise ValueError(
                f"{path} is a tiktoken file, as LLaMA-3 has, which is not supported; "
                "put that release's tokenizer.json beside it"
            )
        try:
            self.first = SentencePieceProcessor(model_proto=data)
            self.later = SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
        except RuntimeError:
            raise ValueError(f"{path} is not a whole sentencepiece file; fetch it again") from None
        self.strip = int(self.first.encode("a") != self.later.encode("a"))
        if settings.legacy:
            self.later = self.first
        self.read_added(settings)
        self.size = 1 + max(self.first.vocab_size() - 1, *self.contents)

    def read_added(self, settings: Settings) -> None:
        """Collect the strings that stand for one id wherever they occur in a text."""
        model, declared = self.first, {*settings.special}
        pieces = {i: model.id_to_piece(i) for i in range(model.vocab_size())}
        tokens = {
            i: AddedToken(piece, special=True)
            for i, piece in pieces.items()
            if model.is_control(i) or model.is_unknown(i) or piece in declared
        }
        tokens |= settings.added
        self.special = {i for i, token in tokens.items() if token.special}
        self.contents = {i: token.content for i, token in tokens.items()}
        self.ids = {content: i for i, content in self.contents.items()}
        longest_first = sorted(tokens.values(), key=lambda token: -len(token.content))
        self.pattern = re.compile("|".join(map(added_pattern, longest_first)))

    def encode(self, text: str) -> list[int]:
        ids, start, model = [], 0, self.first
        for match in self.pattern.finditer(text):
            ids += model.encode(text[start : match.start()])
            ids.append(self.ids[match[match.lastindex]])
            start, model = match.end(), self.later
        return ids + model.encode(text[start:])

    def prefix(self) -> list[int]:
        """Unless told otherwise, LLaMA's sentencepiece tokenizers begin every text with BOS."""
        return [self.first.bos_id()] if self.first.bos_id() >= 0 else []

    def token_id(self, token: str) -> int | None:
        i = self.ids.get(token, self.first.piece_to_id(token))
        return i if token in self.ids or self.first.id_to_piece(i) == token else None

    def piece(self, i: int) -> bytes:
        if i in self.contents:
            return self.contents[i].encode()
        if not 0 <= i < self.first.vocab_size():  # padded beyond the tokenizer's vocabulary
            return b""
        piece = self.first.id_to_piece(i)
        if self.first.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()


def added_pattern(token: AddedToken) -> str:
    """Regular expression of one added token, which may swallow the white space around it."""
    return r"\s*" * token.lstrip + f"({re.escape(token.content)})" + r"\s*" * token.rstrip


def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of GPT-2's byte-level vocabularies.

    Printable bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + n): b for n, b in enumerate(others)}


# --- chat templates -------------------------------------------------------------------------------


class GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it only passes its body on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox and the helpers that published chat templates are written against."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


@cache
def compile_template(template: str) -> jinja2.Template:
    """A template that renders; training does so for every answer of its data."""
    return template_environment().from_string(template)


def to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- the face -------------------------------------------------------------------------------------


class Tokenizer:
    """One tokenizer with its chat template. vocab_size: the largest id it can produce, plus one."""

    def __init__(self, file: JsonFile | SentencePieceFile, settings: Settings) -> None:
        self.file = file
        self.settings = settings
        self.vocab_size = file.size
        self.prefix = file.prefix() if settings.add_bos is None else self.configured_prefix()

    def configured_prefix(self) -> list[int]:
        """BOS as add_bos_token says, against the tokenizer file; ValueError if it has no id."""
        if not self.settings.add_bos:
            return []
        bos = self.settings.named.get("bos_token")
        prefix = self.file.prefix() if bos is None else [self.token_id(bos)]
        if not prefix or None in prefix:
            raise ValueError(
                f"add_bos_token is true, but bos_token {bos!r} is not in the vocabulary; "
                "correct either of them in tokenizer_config.json"
            )
        return prefix

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of `text`; BOS first if this tokenizer adds one and `text` does not begin with it."""
        if not is_text(text):
            raise ValueError("a text holds half of a surrogate pair: give UTF-8 text")
        ids = self.file.encode(text)
        if not add_bos or ids[: len(self.prefix)] == self.prefix:
            return ids
        return self.prefix + ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        stream = StreamDecoder(self, skip_special)
        return stream.push(ids) + stream.flush()

    def token_id(self, token: str) -> int | None:
        return self.file.token_id(token)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that `text` is; None if it is ordinary text."""
        token = self.token_id(text)
        return token if token in self.file.special else None

    def holds_special(self, text: str) -> bool:
        return any(token in self.file.special for token in self.file.encode(text))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.settings.templates)

    def render_chat(self, messages: list[dict], options: dict | None = None) -> str:
        """The prompt that asks for the next answer; ValueError if the template cannot give one.
        `options` are more variables for the template, such as {"enable_thinking": False}."""
        template = self.settings.templates.get("default")
        if template is None:
            names = ", ".join(self.settings.templates) or "none"
            raise ValueError(
                f"no default chat template (there are: {names}); name one so, or leave templates "
                "out (generate.py: --no_chat)"
            )
        values = {"tools": None, "documents": None, "add_generation_prompt": True}
        values |= self.settings.named | (options or {})
        try:
            return compile_template(template).render(messages=messages, **values)
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(
                f"the chat template refuses this conversation ({one_line(error)}); "
                "change the conversation, or leave the template out (generate.py: --no_chat)"
            ) from None

    def encode_chat(self, messages: list[dict], options: dict | None = None) -> list[int]:
        """Ids of the rendered prompt. A template writes BOS itself where the model wants it."""
        return self.encode(self.render_chat(messages, options), add_bos=False)


def is_text(text: str) -> bool:
    """False for half of a surrogate pair: a shell or JSON can bring it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StreamDecoder:
    """Ids to text as they come: all push() pieces and flush(), joined, are `Tokenizer.decode`.

    A character appears once its last byte is there. Bytes that can no longer become one appear as
    U+FFFD: one for each broken-off character in a byte-level vocabulary, one for each byte in a
    sentencepiece one, as those libraries count. The work per push depends only on the ids pushed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self.file = tokenizer.file
        self.skipped = self.file.special if skip_special else frozenset()
        self.utf8 = codecs.getincrementaldecoder("utf-8")(self.file.errors)
        self.strip = self.file.strip  # spaces still to be dropped at the start of the text

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(self.file.piece(i) for i in ids if i not in self.skipped)
        return self.visible(self.utf8.decode(data))

    def flush(self) -> str:
        """The rest, when no more ids will come."""
        return self.visible(self.utf8.decode(b"", final=True))

    def visible(self, text: str) -> str:
        while self.strip and text:
            self.strip, text = (self.strip - 1, text[1:]) if text[0] == " " else (0, text)
        return BAD_BYTE.sub("\ufffd", text)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`.

    FileNotFoundError if there is none, ValueError if one of its files cannot be used.
    """
    found = [path for name in TOKENIZER_FILES if (path := Path(directory) / name).is_file()]
    if not found:
        names = " and ".join(TOKENIZER_FILES)
        raise FileNotFoundError(f"no tokenizer in {directory}: looked for {names}; copy one there")
    path = found[0]
    with path.open("rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise ValueError(f"{path} is a Git LFS pointer, not the file; run: git lfs pull")
    settings = read_settings(path.parent)
    file_type = JsonFile if path.suffix == ".json" else SentencePieceFile
    return Tokenizer(file_type(path, settings), settings)
