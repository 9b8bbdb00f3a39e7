"""The tokenizer's part in a conversion: ends of a text, sizes that fit, files that follow."""

import base64
import codecs
import json
import os
from pathlib import Path

import pytest
import sentencepiece
from hf_folders import LFS, command, convert, make, refusal, tokenizer_json

from talon.checkpoint import read_checkpoint
from talon.text import load
from talon.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    "config_ids, generation_ids, expected",
    [
        ([5, 9], None, [5, 9]),
        (5, [9, 11], [5, 9, 11]),
        (5, 5, [5]),
        (0, None, [0]),
        (None, [0, 7], [0, 7]),
        (None, None, []),
    ],
)
def test_stop_ids_are_the_union_of_both_files(tmp_path, config_ids, generation_ids, expected):
    path = make(tmp_path, {"eos_token_id": config_ids, "bos_token_id": 0})
    if generation_ids is not None:
        content = json.dumps({"eos_token_id": generation_ids})
        (path / "generation_config.json").write_text(content)
    config = convert(path).config
    assert (config["eos_ids"], config["bos_id"]) == (expected, 0)


@pytest.mark.parametrize("form", ["vocab", "added", "decoder", "object", "null"])
def test_the_tokenizers_stop_token_is_resolved_to_its_id(tmp_path, form):
    path = make(tmp_path, {"eos_token_id": 5})
    end = "w9" if form in ("vocab", "object") else "<end>"
    config: dict = {"eos_token": end}
    if form == "object":
        config["eos_token"] = {"content": end, "lstrip": False}
    if form == "decoder":
        config["added_tokens_decoder"] = {"9": {"content": end}}
    if form == "null":
        config["eos_token"] = None
    vocabulary = tokenizer_json(10 if end == "w9" else 9, ("<end>",) * (form in ("added", "null")))
    (path / "tokenizer.json").write_text(vocabulary)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert convert(path).config["eos_ids"] == ([5] if form == "null" else [5, 9])


def test_a_stop_token_without_id_is_noted(tmp_path, capsys):
    path = make(tmp_path)
    (path / "tokenizer.json").write_text(tokenizer_json(9))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert convert(path).config["eos_ids"] == []
    assert "<end>" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["vocab", "unigram", "added", "decoder"])
def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, capsys, form):
    path = make(tmp_path)
    content = tokenizer_json(33 if form == "vocab" else 32, ("big",) * (form == "added"))
    if form == "unigram":
        vocab = [[f"w{i}", 0.0] for i in range(33)]
        content = json.dumps({"model": {"type": "Unigram", "vocab": vocab, "unk_id": 0}})
    (path / "tokenizer.json").write_text(content)
    if form == "decoder":
        config = json.dumps({"added_tokens_decoder": {"32": {"content": "big"}}})
        (path / "tokenizer_config.json").write_text(config)
    refusal(capsys, path, "w32" if form in ("vocab", "unigram") else "big", "32")


def train_sentencepiece(path: Path, size: int) -> None:
    lines = path.with_suffix(".txt")
    lines.write_text("\n".join(["the cat sat on the mat", "a dog ate the hat"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        model_type="bpe",
        minloglevel=2,
    )
    lines.unlink()
    path.with_suffix(".vocab").unlink()


def test_sentencepiece_and_tiktoken_files_are_told_apart_by_content(tmp_path, capsys):
    path = make(tmp_path / "plain")
    train_sentencepiece(path / "tokenizer.model", 30)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert convert(path).config["eos_ids"] == [2]
    train_sentencepiece(path / "tokenizer.model", 34)
    refusal(capsys, path, "tokenizer", "32")
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(40))
    (path / "tokenizer.model").write_text(ranks)
    refusal(capsys, path, "tiktoken", "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [LFS, b"", b"\x00garbage\xff", b'{"model": {"vocab": 3}}', b"\n"]
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, capsys, name, content):
    if name == "tokenizer_config.json" and content.startswith(b"{"):
        content = b'{"added_tokens_decoder": {"x": 1}}'
    (make(tmp_path) / name).write_bytes(content)
    refusal(capsys, tmp_path, name)


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_added_tokens_json_counts_as_the_other_files_do(tmp_path, kind):
    path, out = make(tmp_path / "model"), tmp_path / "out"
    if kind == "tokenizer.json":
        (path / kind).write_text(tokenizer_json(30))
    else:
        train_sentencepiece(path / kind, 30)
    (path / "added_tokens.json").write_text(json.dumps({"<end>": 30}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert command("--checkpoint_dir", path, "--out", out / "m.safetensors") == 0
    assert 30 in read_checkpoint(out / "m.safetensors").config["eos_ids"]
    texts = ("w1 <end> w2", "the <end>cat<end>")
    ids = [load_tokenizer(folder).encode(text) for folder in (path, out) for text in texts]
    assert ids[:2] == ids[2:] and all(30 in found for found in ids)


def test_sentencepieces_own_end_counts_where_the_files_name_the_beginning(tmp_path, capsys):
    """LLaMA-1 as it was first converted: every name of a token empty, eos_token_id 1, <s>."""
    path = make(tmp_path, {"architectures": ["LLaMAForCausalLM"], "eos_token_id": 1})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    empty = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "")
    (path / "tokenizer_config.json").write_text(json.dumps(empty))
    train_sentencepiece(path / "tokenizer.model", 30)
    assert convert(path).config["eos_ids"] == [1, 2]
    assert "tokenizer.model ends texts with id 2" in capsys.readouterr().err
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert convert(path).config["eos_ids"] == [1, 2]
    assert "tokenizer.model" not in capsys.readouterr().err


@pytest.mark.parametrize("form", ["added_tokens.json", "tokenizer.json"])
def test_a_padding_token_behind_the_embedding_is_never_produced_and_refused_in_a_prompt(
    tmp_path, form
):
    path = make(tmp_path)
    (path / "tokenizer.json").write_text(tokenizer_json(32, ("<pad>",) * (form[0] == "t"), True))
    if form[0] == "a":
        (path / form).write_text(json.dumps({"<pad>": 32}))
    (path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    (path / "tokenizer_config.json").write_text(json.dumps({"pad_token": None}))
    engine = load(convert(path).path, compile=False)
    assert engine.tokenizer.encode("w3 <pad>") == [3, 32]
    generation = engine.generate("w3 w4", max_new_tokens=8)
    assert "".join(generation) and len(generation.tokens) == 8
    with pytest.raises(ValueError, match="outside 0 to 31"):
        "".join(engine.generate("w3 <pad>", max_new_tokens=8))


def test_only_padding_may_stand_behind_the_embedding(tmp_path, capsys):
    path = make(tmp_path)
    (path / "tokenizer.json").write_text(tokenizer_json(32, ("<turn>", "<pad>"), True))
    (path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    refusal(capsys, path, "<turn>", "32")


def test_a_byte_order_mark_means_nothing_in_any_file(tmp_path):
    path = make(tmp_path, {"eos_token_id": 5})
    files = {
        "generation_config.json": json.dumps({"eos_token_id": [7]}),
        "tokenizer.json": tokenizer_json(20),
        "tokenizer_config.json": json.dumps({"eos_token": "w9"}),
        "special_tokens_map.json": json.dumps({"bos_token": "w1"}),
        "added_tokens.json": json.dumps({"<new>": 20}),
        "chat_template.jinja": "{{ bos_token }} w3",
    }
    for name, content in files.items():
        (path / name).write_text(content)
    plain, messages = convert(path).config, [{"role": "user", "content": "w4"}]
    ids = load_tokenizer(path).encode_chat(messages)
    for name in ("config.json", *files):
        (path / name).write_bytes(codecs.BOM_UTF8 + (path / name).read_bytes())
        assert convert(path).config == plain
        assert load_tokenizer(path).encode_chat(messages) == ids == [1, 3]


ODD_SETTINGS = [
    {"bos_token": ["<s>"]},
    {"bos_token": 1},
    {"eos_token": {"lstrip": False}},
    {"eos_token": {"content": 3}},
    {"eos_token": ["w1", "w2"]},
    {"pad_token": True},
    {"additional_special_tokens": "w1"},
    {"additional_special_tokens": [None]},
    {"additional_special_tokens": [{"content": []}]},
    {"added_tokens_decoder": [1]},
    {"added_tokens_decoder": {"x": {"content": "w1"}}},
    {"added_tokens_decoder": {"9": "w9"}},
    {"added_tokens_decoder": {"9": {"content": None}}},
    {"added_tokens_decoder": {"9": {"content": "w9", "special": "yes"}}},
    {"add_bos_token": "true"},
    {"legacy": 0},
    {"add_prefix_space": "no"},
    {"chat_template": 3},
    {"chat_template": ["{{ messages }}"]},
    {"chat_template": [{"name": "default"}]},
    {"chat_template": {"default": None}},
]


@pytest.mark.parametrize("settings", ODD_SETTINGS)
def test_an_odd_setting_of_the_tokenizer_is_named(tmp_path, capsys, settings):
    path, key = make(tmp_path), next(iter(settings))
    (path / "tokenizer.json").write_text(tokenizer_json(9))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    refusal(capsys, path, "tokenizer_config.json", key)
    with pytest.raises(ValueError, match=key) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["[]", '{"bos_token": []}', '{"bos_token": 1.5}'])
def test_an_odd_file_next_to_the_tokenizer_is_named(tmp_path, capsys, name, content):
    path = make(tmp_path)
    (path / "tokenizer.json").write_text(tokenizer_json(9))
    (path / name).write_text(content)
    refusal(capsys, path, name)


def test_tokenizer_files_follow_the_output(tmp_path):
    path, out = make(tmp_path / "model"), tmp_path / "new" / "dir" / "m.safetensors"
    contents = {
        "tokenizer.json": tokenizer_json(9),
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
    }
    for name, text in contents.items():
        (path / name).write_text(text)
    for _ in range(2):  # the second time they are already there
        assert command("--checkpoint_dir", path, "--out", out) == 0
    assert sorted(os.listdir(out.parent)) == sorted([out.name, *contents])
    assert all((out.parent / name).read_text() == text for name, text in contents.items())


def test_another_models_tokenizer_is_not_overwritten(tmp_path, capsys):
    path, out = make(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (path / "tokenizer.json").write_text(tokenizer_json(9))
    (path / "chat_template.jinja").write_text("new")
    (out / "chat_template.jinja").write_text("old")
    refusal(capsys, path, "chat_template.jinja", flags=("--out", str(out / "m.safetensors")))
    assert os.listdir(out) == ["chat_template.jinja"]
