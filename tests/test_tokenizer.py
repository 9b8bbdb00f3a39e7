"""Tokenizer files made here: ids and text equal to the libraries' own, streamed or not."""

import io
import json
import random
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from talon.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(a, b):\n    return a + b  # adds 12 and 345\n",
    "Hello world, hello there: what is the capital of France?",
]
TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    "  two spaces first, and last  ",
    "line\n\nline\ttab",
    "👩‍👩‍👧 and 😀😀",
    "日本語と中文",
    "e\u0301 e\u0302\u0323 combining",
    "caf\u00e9 \u2581 na\u00efve",
]
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello 😀"}]


# --- the tokenizers under test --------------------------------------------------------------------


def byte_level_model() -> JsonTokenizer:
    """LLaMA-3's shape: byte-level BPE and a post-processor that writes BOS."""
    model = JsonTokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=LLAMA3_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    bos = LLAMA3_SPECIAL[0]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]
    )
    model.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return model


@pytest.fixture(scope="module")
def sentencepiece_bytes() -> bytes:
    """LLaMA-2's shape: BPE with byte fallback, a dummy space in front, nothing normalised."""
    buffer = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_writer=buffer,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    return buffer.getvalue()


def json_of_sentencepiece(data: bytes, legacy: bool, prefix_space: bool = True) -> JsonTokenizer:
    """The same vocabulary as a tokenizer.json of the kind that Hugging Face ships for LLaMA-2."""
    source = SentencePieceProcessor(model_proto=data)
    vocab = {source.id_to_piece(i): i for i in range(source.vocab_size())}
    merges = [
        (vocab[piece], piece[:cut], piece[cut:])
        for piece in vocab
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab and not source.is_byte(vocab[piece])
    ]
    pairs = [(left, right) for _, left, right in sorted(merges)]
    model = JsonTokenizer(
        models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        model.normalizer = normalizers.Sequence(steps[not prefix_space :])
    else:
        scheme = "first" if prefix_space else "never"
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix_space)
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    return model


def write_json(directory: Path, name: str, value: dict) -> None:
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    byte_level_model().save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": LLAMA3_SPECIAL[0], "chat_template": LLAMA3_TEMPLATE}
    write_json(tmp_path, "tokenizer_config.json", settings)
    return load_tokenizer(tmp_path)


@pytest.fixture
def sentencepiece(tmp_path: Path, sentencepiece_bytes: bytes) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    return load_tokenizer(tmp_path)


@pytest.fixture
def llama2_json(tmp_path: Path, sentencepiece_bytes: bytes) -> Tokenizer:
    json_of_sentencepiece(sentencepiece_bytes, legacy=True).save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What each push of `sizes` ids (repeated) shows, and the flush."""
    decoder, pieces, start = StreamDecoder(tokenizer), [], 0
    for n in range(len(ids)):
        if start >= len(ids):
            break
        size = sizes[n % len(sizes)]
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    return [*pieces, decoder.flush()]


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_and_text_equal_the_library(byte_level: Tokenizer, text: str) -> None:
    library = byte_level_model()
    ids = byte_level.encode(text)
    assert ids == library.encode(text).ids
    assert byte_level.decode(ids) == library.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids_and_text_equal_both_libraries(
    sentencepiece: Tokenizer, sentencepiece_bytes: bytes, text: str
) -> None:
    own = SentencePieceProcessor(model_proto=sentencepiece_bytes)
    as_json = json_of_sentencepiece(sentencepiece_bytes, legacy=True)
    ids = sentencepiece.encode(text)
    assert ids == [1, *own.encode(text)] == as_json.encode(text).ids
    assert sentencepiece.decode(ids) == own.decode(ids) == as_json.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("text", [*TEXTS, "Hello</s> Hello", "</s>the dog"])
def test_a_sentencepiece_folder_may_do_without_the_space_in_front(
    tmp_path: Path, sentencepiece_bytes: bytes, legacy: bool, text: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    write_json(tmp_path, "tokenizer_config.json", {"legacy": legacy, "add_prefix_space": False})
    library = json_of_sentencepiece(sentencepiece_bytes, legacy, prefix_space=False)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "Hello</s>\nworld",
        "</s>Hello",
        "Hello </s> <s>the dog",
        "<s>[INST] Hello [/INST]",
        "a<unk>b",
    ],
)
def test_special_tokens_inside_text_become_ids_as_in_hugging_face(
    tmp_path: Path, sentencepiece_bytes: bytes, legacy: bool, text: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    write_json(tmp_path, "tokenizer_config.json", {"legacy": legacy})
    as_json = json_of_sentencepiece(sentencepiece_bytes, legacy)
    expected = as_json.encode(text, add_special_tokens=False).ids
    assert load_tokenizer(tmp_path).encode(text, add_bos=False) == expected


def test_added_tokens_of_a_sentencepiece_folder_are_found(
    tmp_path: Path, sentencepiece_bytes: bytes
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    added = {"341": {"content": "<|im_end|>", "special": True, "rstrip": True}}
    write_json(tmp_path, "added_tokens.json", {"<|im_start|>": 340, "<tool>": 342})
    added["343"] = {"content": ""}
    settings = {"added_tokens_decoder": added, "additional_special_tokens": ["<|im_start|>"]}
    write_json(tmp_path, "tokenizer_config.json", settings)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("<|im_start|>Hello<|im_end|>  \n<tool>")
    hello = tokenizer.file.first.encode("Hello")
    assert ids == [1, 340, *hello, 341, 342]  # <|im_end|> takes the white space after it
    assert tokenizer.vocab_size == 343
    assert tokenizer.token_id("<|im_end|>") == 341
    assert tokenizer.decode(ids) == "Hello<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "<s><|im_start|> Hello<|im_end|><tool>"


def test_tokens_that_only_the_config_adds_to_a_json_file_get_their_ids(tmp_path: Path) -> None:
    byte_level_model().save(str(tmp_path / "tokenizer.json"))
    size = byte_level_model().get_vocab_size()
    added = {str(size): {"content": "<|pad|>", "special": True}}
    write_json(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<|pad|>", add_bos=False)[-1] == size
    assert tokenizer.vocab_size == size + 1
    added = {str(size + 7): {"content": "<|pad|>", "special": True}}
    write_json(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(ValueError, match="take all files from one release"):
        load_tokenizer(tmp_path)


def test_truncation_stored_in_a_json_file_does_not_cut_prompts(tmp_path: Path) -> None:
    model = byte_level_model()
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over"
    assert load_tokenizer(tmp_path).encode(text) == byte_level_model().encode(text).ids


def test_token_id_is_none_for_a_string_that_is_no_token(
    byte_level: Tokenizer, llama2_json: Tokenizer, sentencepiece_bytes: bytes, tmp_path: Path
) -> None:
    assert byte_level.token_id("<|eot_id|>") == 4
    assert byte_level.token_id("<|none|>") is None
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp" / "tokenizer.model").write_bytes(sentencepiece_bytes)
    tokenizer = load_tokenizer(tmp_path / "sp")
    assert [tokenizer.token_id(t) for t in ("<unk>", "</s>", "<|none|>")] == [0, 2, None]


# --- BOS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["json", "model"])
@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("text", ["Hello", "<s>Hello", ""])
def test_bos_comes_once_or_as_configured(
    tmp_path: Path, sentencepiece_bytes: bytes, kind: str, add_bos: bool | None, text: str
) -> None:
    if kind == "json":
        model = json_of_sentencepiece(sentencepiece_bytes, legacy=True)
        model.save(str(tmp_path / "tokenizer.json"))
    else:
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    bos = {"__type": "AddedToken", "content": "<s>"}
    config = {"bos_token": bos, "add_bos_token": add_bos}
    write_json(tmp_path, "tokenizer_config.json", config)
    ids = load_tokenizer(tmp_path).encode(text)
    wanted = 0 if add_bos is False and "<s>" not in text else 1
    assert ids.count(1) == wanted
    assert ids[:1] == [1] or wanted == 0


def test_add_bos_without_a_bos_token_is_refused(tmp_path: Path) -> None:
    byte_level_model().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<none>", "add_bos_token": True}
    write_json(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ValueError, match="'<none>' is not in the vocabulary"):
        load_tokenizer(tmp_path)


# --- streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "llama2_json"])
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1, 5], [1000]])
def test_streamed_pieces_join_to_the_decoded_text(
    kind: str, sizes: list[int], request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = streamed(tokenizer, ids, sizes)
        if kind != "byte_level":  # sentencepiece cannot tell its sign for a space from a space
            text = text.replace("\u2581", " ")
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_random_ids_stream_to_what_the_library_decodes(
    kind: str, sentencepiece_bytes: bytes, request: pytest.FixtureRequest
) -> None:
    """Mostly broken UTF-8, so the count of replacement characters is compared as well."""
    tokenizer = request.getfixturevalue(kind)
    source = random.Random(0)
    library = byte_level_model()
    if kind == "sentencepiece":
        library = SentencePieceProcessor(model_proto=sentencepiece_bytes)
    for _ in range(200):
        ids = [source.randrange(5, tokenizer.vocab_size) for _ in range(source.randrange(30))]
        pieces = streamed(tokenizer, ids, [source.randrange(1, 4) for _ in range(3)])
        assert "".join(pieces) == tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "llama2_json"])
def test_a_character_appears_with_its_last_byte(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("a😀b", add_bos=False)
    assert [p for p in streamed(tokenizer, ids, [1]) if p] == ["a", "😀", "b"]


@pytest.mark.parametrize(
    ("kind", "marks"), [("byte_level", 1), ("sentencepiece", 3), ("llama2_json", 3)]
)
def test_a_text_that_stops_inside_a_character_ends_in_replacement_marks(
    kind: str, marks: int, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("a😀", add_bos=False)[:-1]
    pieces = streamed(tokenizer, ids, [1])
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd" * marks
    assert tokenizer.decode(ids) == "".join(pieces)


def test_broken_bytes_are_shown_as_soon_as_they_cannot_become_a_character(
    byte_level: Tokenizer,
) -> None:
    start = byte_level.encode("😀", add_bos=False)[:2]
    letter = byte_level.encode("a", add_bos=False)
    decoder = StreamDecoder(byte_level)
    assert [decoder.push([i]) for i in start] == ["", ""]
    assert decoder.push(letter) == "\ufffda"
    assert decoder.flush() == ""


def test_ids_beyond_the_vocabulary_add_nothing(
    byte_level: Tokenizer, sentencepiece_bytes: bytes, tmp_path: Path
) -> None:
    assert byte_level.decode([9999, *byte_level.encode("dog"), 9999]) == "dog"
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp" / "tokenizer.model").write_bytes(sentencepiece_bytes)
    tokenizer = load_tokenizer(tmp_path / "sp")
    assert tokenizer.decode([9999, *tokenizer.encode("dog"), 9999]) == "dog"


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_vocabulary_is_read_as_such_under_another_decoder(
    tmp_path: Path, sentencepiece_bytes: bytes, text: str
) -> None:
    model = byte_level_model()
    model.decoder = json_of_sentencepiece(sentencepiece_bytes, legacy=True).decoder
    model.add_special_tokens(["<\uff5cend\u2581of\u2581turn\uff5c>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == byte_level_model().decode(ids) == text
    assert "".join(streamed(tokenizer, ids, [1])) == text


def test_a_whole_word_vocabulary_puts_one_space_between_words(tmp_path: Path) -> None:
    model = JsonTokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("one two") == [0, 1]
    assert tokenizer.decode([0, 1, 0]) == model.decode([0, 1, 0]) == "one two one"


# --- chat -----------------------------------------------------------------------------------------


def test_a_rendered_chat_has_one_bos_and_special_ids(byte_level: Tokenizer) -> None:
    assert byte_level.has_chat_template
    text = byte_level.render_chat(MESSAGES)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello 😀<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = byte_level.encode_chat(MESSAGES)
    assert ids == byte_level_model().encode(text, add_special_tokens=False).ids
    assert ids == byte_level.encode(text)  # a rendered text does not get a second BOS either
    assert ids[:2] == [0, 2]
    assert ids.count(0) == 1


TALK = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>"


@pytest.mark.parametrize("form", ["byte_level", "model", "json", "model legacy", "json legacy"])
def test_special_tokens_that_a_message_writes_out_stay_text(
    tmp_path: Path, sentencepiece_bytes: bytes, form: str
) -> None:
    settings, sign, names = {"chat_template": TALK, "legacy": "legacy" in form}, "</s>", "<s> </s>"
    if form == "byte_level":
        sign, names = LLAMA3_SPECIAL[0], " ".join(LLAMA3_SPECIAL)
        byte_level_model().save(str(tmp_path / "tokenizer.json"))
        settings = {"chat_template": LLAMA3_TEMPLATE}
    elif form.startswith("json"):
        model = json_of_sentencepiece(sentencepiece_bytes, settings["legacy"])
        model.save(str(tmp_path / "tokenizer.json"))
    else:
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    write_json(tmp_path, "tokenizer_config.json", settings)
    tokenizer = load_tokenizer(tmp_path)

    def said(text: str) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": text}])

    def special(ids: list[int]) -> list[int]:
        return [i for i in ids if i in tokenizer.file.special]

    harmless, text = said("Hello"), f"Say {sign} and {names}"
    assert harmless == tokenizer.encode(
        tokenizer.render_chat([{"role": "user", "content": "Hello"}]), add_bos=False
    )
    ids = said(text)
    assert special(ids) == special(harmless)
    shown = tokenizer.decode(ids, skip_special=False)
    if "legacy" not in form or form == "byte_level":  # there every part begins with a space
        assert shown.strip() == tokenizer.render_chat([{"role": "user", "content": text}]).strip()
    assert text in shown and said("Hello") == harmless  # nothing of it stays behind


@pytest.mark.parametrize("legacy", [True, False])
def test_both_forms_agree_on_special_tokens_in_messages(
    tmp_path: Path, sentencepiece_bytes: bytes, legacy: bool
) -> None:
    found = []
    for form in ("model", "json"):
        (directory := tmp_path / form).mkdir()
        if form == "json":
            model = json_of_sentencepiece(sentencepiece_bytes, legacy)
            model.save(str(directory / "tokenizer.json"))
        else:
            (directory / "tokenizer.model").write_bytes(sentencepiece_bytes)
        settings = {"chat_template": TALK, "legacy": legacy}
        write_json(directory, "tokenizer_config.json", settings)
        messages = [{"role": "user", "content": "end it </s> here"}]
        found.append(load_tokenizer(directory).encode_chat(messages))
    assert found[0] == found[1]


def with_template(directory: Path, template: str | list) -> Tokenizer:
    byte_level_model().save(str(directory / "tokenizer.json"))
    write_json(directory, "tokenizer_config.json", {"chat_template": template})
    return load_tokenizer(directory)


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert with_template(tmp_path, named).render_chat(MESSAGES) == "D"
    with pytest.raises(ValueError, match="there are: tool_use"):
        with_template(tmp_path, named[:1]).render_chat(MESSAGES)
    by_name = {"tool_use": "T", "default": "D"}
    assert with_template(tmp_path, by_name).render_chat(MESSAGES) == "D"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert with_template(tmp_path, "from the config").render_chat(MESSAGES) == "from the file"


def test_templates_have_the_helpers_that_published_ones_use(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{%- endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "<é>"}]
    rendered = with_template(tmp_path, template).render_chat(messages)
    assert rendered == '{"role": "user", "content": "<é>"}4True'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{% for %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ nothing.there.at_all }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_one_line(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses") as caught:
        with_template(tmp_path, template).render_chat(MESSAGES)
    assert "\n" not in str(caught.value)


def test_no_template_is_said(llama2_json: Tokenizer) -> None:
    assert not llama2_json.has_chat_template
    with pytest.raises(ValueError, match="no default chat template"):
        llama2_json.render_chat(MESSAGES)


# --- files ----------------------------------------------------------------------------------------


def test_the_json_file_is_preferred(tmp_path: Path, sentencepiece_bytes: bytes) -> None:
    byte_level_model().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes)
    assert load_tokenizer(tmp_path).encode("Hello") == byte_level_model().encode("Hello").ids


def test_a_missing_tokenizer_names_the_files_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json and tokenizer.model"):
        load_tokenizer(tmp_path)


def test_a_tiktoken_file_is_known_by_its_content(tmp_path: Path) -> None:
    lines = [
        b"%s %d" % (word, n) for n, word in enumerate([b"IQ==", b"Ig==", b"Iw==", b"IHRoZQ=="])
    ]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ValueError, match="tiktoken .* tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_folder_name_does_not_decide_the_format(
    tmp_path: Path, sentencepiece_bytes: bytes
) -> None:
    directory = tmp_path / "Meta-Llama-3-8B"
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(sentencepiece_bytes)
    assert load_tokenizer(directory).decode(load_tokenizer(directory).encode("Hello")) == "Hello"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", LFS, "Git LFS pointer"),
        ("tokenizer.model", LFS, "Git LFS pointer"),
        ("tokenizer.json", b'{"version": "1.0", "trunc', "cannot be read"),
        ("tokenizer.json", b"{}", "cannot be read"),
        ("tokenizer.json", b"\xff\xfe", "is not UTF-8"),
        ("tokenizer.model", b"", "is empty"),
        ("tokenizer.model", b"garbage", "not a whole sentencepiece file"),
    ],
)
def test_damaged_files_are_one_line(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_sentencepiece_file_is_refused(
    tmp_path: Path, sentencepiece_bytes: bytes
) -> None:
    for kept in (0.3, 0.6, 0.9):
        data = sentencepiece_bytes[: int(kept * len(sentencepiece_bytes))]
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(ValueError, match="not a whole sentencepiece file"):
            load_tokenizer(tmp_path)


def test_a_decoder_that_is_not_understood_is_named(tmp_path: Path) -> None:
    model = byte_level_model()
    model.decoder = decoders.WordPiece()
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="WordPiece.*not supported; supported are ByteLevel"):
        load_tokenizer(tmp_path)


def test_a_broken_config_beside_the_tokenizer_is_named(tmp_path: Path) -> None:
    byte_level_model().save(str(tmp_path / "tokenizer.json"))
    for content in ("{", "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match="tokenizer_config.json"):
            load_tokenizer(tmp_path)
