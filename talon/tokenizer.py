"""Text to token ids and back: two tokenizer formats behind one face, chat templates, streaming.

Reads the files next to a checkpoint (TOKENIZER_FILES): tokenizer.json, the first choice, being the
form Hugging Face runs, or sentencepiece's tokenizer.model. Ids are those Hugging Face gives. Leaves
out: tiktoken files (LLaMA-3 ships tokenizer.json as well), batches, and Hugging Face's
`clean_up_tokenization_spaces`, which rewrites text that a stream has already shown.

    python -c "from talon.tokenizer import *; print(load_tokenizer('DIR').encode('Hello'))"
"""

import codecs
import itertools
import json
import os
import re
from collections.abc import Iterable
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken
from tokenizers import Tokenizer as JsonTokenizer

from talon.checkpoint import check_file
from talon.cli import one_line
from talon.settings import TokenizerConfig, read_text, read_tokenizer_config

# Either of these is a whole vocabulary; the first that is there counts.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (*VOCABULARY_FILES, *SETTINGS_FILES, "chat_template.jinja")

# How sentencepiece writes a space.
SPACE = "\u2581"
# Appended to a sentencepiece model: normalizer_spec { add_dummy_prefix: false }.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
# What the error handler "surrogateescape" makes of a bad byte.
BAD_BYTE = re.compile("[\udc80-\udcff]")
GUARD = "\ufdd0"  # no character of any text


# --- the two file formats -------------------------------------------------------------------------
# Both have: size, eos_id, special (id: name), strip (spaces to drop at the start of a text), errors
# (for UTF-8), encode(text), prefix(), token_id(string), and piece(id): the bytes one token adds.


class JsonFile:
    """tokenizer.json through the `tokenizers` library."""

    eos_id = None  # the files next to it name the token

    def __init__(self, path: Path, config: TokenizerConfig) -> None:
        content = read_text(path)
        try:
            self.model = JsonTokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} cannot be read ({one_line(error)}); fetch it again") from None
        self.model.no_truncation()  # the file may carry a training set-up that would cut prompts
        self.model.no_padding()
        self.spaced = getattr(self.model.pre_tokenizer, "prepend_scheme", "") == "first"
        self.add_configured(path, config)
        added = self.model.get_added_tokens_decoder()
        self.special = {i: token.content for i, token in added.items() if token.special}
        self.size = 1 + max(self.model.get_vocab(with_added_tokens=True).values(), default=-1)
        self.read_decoder(path)

    def add_configured(self, path: Path, config: TokenizerConfig) -> None:
        """Add what only the other files declare; ValueError if an id would not be theirs."""
        known = {token.content for token in self.model.get_added_tokens_decoder().values()}
        for i, token in sorted(config.added.items()):
            if token.content in known:
                continue
            self.model.add_tokens([token])
            if (got := self.token_id(token.content)) != i:
                given = f"{path} gives {token.content!r} the id {got}, the files next to it {i}"
                raise ValueError(f"{given}; take all files from one release")
        for name in config.special:
            if name not in known and self.token_id(name) is not None:
                self.model.add_special_tokens([name])

    def read_decoder(self, path: Path) -> None:
        """Learn how a token becomes text, to do it token by token; ValueError for unknown steps."""
        decoder, state = self.model.decoder, {"type": "none"}
        if decoder is not None:
            state = json.loads(decoder.__getstate__())
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
        if not self.alphabet and self.is_byte_level():
            self.alphabet, self.before, self.strip = byte_level_alphabet(), "", 0
        self.errors = "replace" if self.alphabet else "surrogateescape"

    def is_byte_level(self) -> bool:
        """Whether the vocabulary is, whatever the decoder: some files pair it with another's."""
        added = {token.content for token in self.model.get_added_tokens_decoder().values()}
        letters = set("".join(self.model.get_vocab(with_added_tokens=False).keys() - added))
        return "\u0120" in letters and letters <= byte_level_alphabet().keys()

    def encode(self, text: str, plain: bool = False, first: bool = True) -> list[int]:
        """plain: special tokens are text; first: nothing stands before it."""
        self.model.encode_special_tokens = plain
        if self.spaced:
            self.model.pre_tokenizer.prepend_scheme = "first" if first else "never"
        return self.model.encode(text, add_special_tokens=False).ids

    def prefix(self) -> list[int]:
        """Ids that the file's post-processor puts before every text."""
        encoded = self.model.encode("a")
        marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [i for i, _ in itertools.takewhile(lambda pair: pair[1], marked)]

    def token_id(self, token: str) -> int | None:
        return self.model.token_to_id(token)

    def piece(self, i: int) -> bytes:
        token = self.model.id_to_token(i)
        if token is None:  # a model's vocabulary may be padded beyond the tokenizer's
            return b""
        if self.alphabet and all(c in self.alphabet for c in token):
            return bytes(self.alphabet[c] for c in token)
        if self.byte_fallback and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return (self.before + token).encode()


class SentencePieceFile:
    """tokenizer.model through the `sentencepiece` library, plus Hugging Face's added tokens."""

    errors = "surrogateescape"

    def __init__(self, path: Path, config: TokenizerConfig) -> None:
        data = path.read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
            raise ValueError(f"{path} is a tiktoken file; put the release's tokenizer.json there")
        try:
            self.first = SentencePieceProcessor(model_proto=data)
            self.later = SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
        except RuntimeError:
            raise ValueError(f"{path} is not a whole sentencepiece file; fetch it again") from None
        if not config.add_prefix_space:
            self.first = self.later
        self.strip = int(self.first.encode("a") != self.later.encode("a"))
        if config.legacy:
            self.later = self.first
        self.eos_id = self.first.eos_id() if self.first.eos_id() >= 0 else None
        self.read_added(config)
        self.size = 1 + max(self.first.vocab_size() - 1, *self.contents)

    def read_added(self, config: TokenizerConfig) -> None:
        """Collect the strings that stand for one id wherever they occur in a text."""
        model, declared = self.first, {*config.special}
        pieces = {i: model.id_to_piece(i) for i in range(model.vocab_size())}
        tokens = {
            i: AddedToken(piece, special=True)
            for i, piece in pieces.items()
            if model.is_control(i) or model.is_unknown(i) or piece in declared
        }
        tokens |= config.added
        self.special = {i: token.content for i, token in tokens.items() if token.special}
        self.contents = {i: token.content for i, token in tokens.items()}
        self.ids = {content: i for i, content in self.contents.items()}
        # A token may swallow the white space around it.
        patterns = [
            r"\s*" * token.lstrip + f"({re.escape(token.content)})" + r"\s*" * token.rstrip
            for token in sorted(tokens.values(), key=lambda token: -len(token.content))
        ]
        self.pattern = re.compile("|".join(patterns))

    def encode(self, text: str, plain: bool = False, first: bool = True) -> list[int]:
        ids, start, model = [], 0, self.first if first else self.later
        for match in () if plain else self.pattern.finditer(text):
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


def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of GPT-2's byte-level vocabularies: printable bytes stand for
    themselves, the others take the characters from U+0100 on, in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + n): b for n, b in enumerate(others)}


class GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it only passes its body on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def compile_template(template: str) -> jinja2.Template:
    """A template with the sandbox and the helpers that published ones are written against."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class Tokenizer:
    """One tokenizer with its chat template. vocab_size: the largest id in a text, plus one."""

    def __init__(self, file: JsonFile | SentencePieceFile, config: TokenizerConfig) -> None:
        self.file = file
        self.settings = config
        # A token for padding may stand behind the model's vocabulary: no text has it.
        pad = file.token_id(config.named.get("pad_token", ""))
        self.vocab_size = file.size - (pad == file.size - 1)
        self.prefix = file.prefix() if config.add_bos is None else self.configured_prefix()

    def configured_prefix(self) -> list[int]:
        """BOS as add_bos_token says, against the tokenizer file; ValueError if it has no id."""
        if not self.settings.add_bos:
            return []
        bos = self.settings.named.get("bos_token")
        prefix = self.file.prefix() if bos is None else [self.token_id(bos)]
        if not prefix or None in prefix:
            fault = f"bos_token {bos!r} is not in the vocabulary"
            raise ValueError(f"{fault}; correct tokenizer_config.json, or its add_bos_token")
        return prefix

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of `text`; BOS first if this tokenizer adds one and `text` does not begin with it."""
        if not is_text(text):
            raise ValueError("the text holds bytes that are not UTF-8: give UTF-8 text")
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
        return not self.file.special.keys().isdisjoint(self.file.encode(text))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.settings.templates)

    def takes_option(self, name: str) -> bool:
        """Whether the chat template names such a variable, which would else have no effect."""
        template = self.settings.templates.get("default", "")
        return name != "messages" and name in re.findall(r"\w+", template)

    def render_chat(self, messages: list[dict], options: dict | None = None) -> str:
        """The prompt that asks for the next answer; ValueError if the template cannot give one.
        `options` are more variables for the template, such as {"enable_thinking": False}."""
        template = self.settings.templates.get("default")
        if template is None:
            names = ", ".join(self.settings.templates) or "none"
            named = f"no default chat template (there are: {names})"
            raise ValueError(f"{named}; name one so, or leave it out (generate.py: --no_chat)")
        values = {"tools": None, "documents": None, "add_generation_prompt": True}
        values |= self.settings.named | (options or {})
        try:
            return compile_template(template).render(messages=messages, **values)
        except Exception as error:  # a template is a program: it may raise anything
            refusal = f"the chat template refuses this conversation ({one_line(error)})"
            raise ValueError(f"{refusal}; change it (generate.py: --no_chat)") from None

    def encode_chat(self, messages: list[dict], options: dict | None = None) -> list[int]:
        """Ids of the rendered prompt. A template writes BOS itself where the model wants it. What
        messages say of special tokens stays text: only the template's own are tokens."""
        names = sorted(self.file.special.values(), key=len, reverse=True)
        special = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        # A name that a message holds is torn apart until the template is filled in.
        torn = partial(special.sub, lambda name: GUARD.join(name[0]))
        said = [{k: torn(v) if isinstance(v, str) else v for k, v in m.items()} for m in messages]
        text = self.render_chat(said, options)
        if GUARD not in text or not is_text(text):
            return self.encode(text, add_bos=False)
        ids = []
        for i, part in enumerate(special.split(text)):  # every other one is a special token
            plain = part.replace(GUARD, "")
            ids += [self.token_id(part)] if i % 2 else self.file.encode(plain, True, not i)
        return ids


def is_text(text: str) -> bool:
    """False for half of a surrogate pair: a shell or JSON can bring it, no tokenizer takes it."""
    return re.search("[\ud800-\udfff]", text) is None


class StreamDecoder:
    """Ids to text as they come: all push() pieces and flush(), joined, are `Tokenizer.decode`.

    A character appears once its last byte is there. Bytes that can no longer become one appear as
    U+FFFD: one for each broken-off character in a byte-level vocabulary, one for each byte in a
    sentencepiece one, as those libraries count. A push takes work for the ids pushed alone."""

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


def find_vocabulary(directory: Path) -> Path | None:
    """The file that a tokenizer in `directory` would be read from, if there is one."""
    found = (Path(directory) / name for name in VOCABULARY_FILES)
    return next((path for path in found if os.path.lexists(path)), None)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`; FileNotFoundError if there is none, ValueError if damaged."""
    path = find_vocabulary(directory)
    if path is None:
        names = " and ".join(VOCABULARY_FILES)
        raise FileNotFoundError(f"no tokenizer in {directory}: looked for {names}; copy one there")
    check_file(path)
    config = read_tokenizer_config(path.parent)
    file_type = JsonFile if path.suffix == ".json" else SentencePieceFile
    return Tokenizer(file_type(path, config), config)
