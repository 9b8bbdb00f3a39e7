"""The tokenizer's part in a conversion: ends of a text, sizes that fit, files that follow."""

import base64
import json
import os
from pathlib import Path

import pytest
import sentencepiece
from hf_folders import LFS, command, convert, make, refusal, tokenizer_json


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


def test_tokenizer_files_follow_the_output(tmp_path):
    path, out = make(tmp_path / "model"), tmp_path / "new" / "dir" / "m.safetensors"
    contents = {
        "tokenizer.json": tokenizer_json(9),
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
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
