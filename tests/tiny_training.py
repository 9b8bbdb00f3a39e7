"""What the tests of training share: a tiny target with tokenizer and template, data, and runs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import train_draft
from model import ModelConfig, Transformer
from talon import cli
from talon.checkpoint import TensorSpec, read_checkpoint
from talon.training.conversations import Conversation
from talon.training.losses import TrainingConfig
from talon.writing import write_checkpoint

VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Drops the reasoning of answers, and opens that of the next one.
THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>' + m.content }}{% else %}"
    "{{ '<|start|>:' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>:<think>\n' }}{% endif %}"
)
HEADS = pytest.mark.parametrize("family", ["eagle1", "eagle3"])
SMALL = ("--device", "cpu", "--draft_vocab_size", 200, "--batch_tokens", 200, "--max_length", 128)


def tiny_config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": VOCAB, "dim": 32, "n_layer": 7, "n_head": 4, "n_kv_head": 2, "head_dim": 8,
        "intermediate_size": 48, "norm_eps": 1e-5, "max_seq_length": 256, "eos_ids": (1,),
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def tiny_target(seed: int = 0, **changes: object) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.25)
    model.norm.weight.data.uniform_(0.5, 2)
    return model.eval().requires_grad_(False)


def write_target(directory: Path, model: Transformer, template: str = TEMPLATE) -> Path:
    """A target file with a byte-level tokenizer and a chat template next to it."""
    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    path = directory / "talon.safetensors"
    write_checkpoint(
        path, kind="target", config=asdict(model.config), specs=specs, tensors=state.items()
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|start|>": 0, "<|end|>": 1} | {piece: i + 2 for i, piece in enumerate(alphabet)}
    tokenizer = JsonTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return path


def write_spaced_tokenizer(directory: Path, form: str, template: str) -> None:
    """A tokenizer that writes a space with the word after it and begins texts with one more, as
    LLaMA-2's does: in the form of sentencepiece ("model") or of Hugging Face ("json")."""
    corpus = ["the yes [INST] answer [/INST] of a user is here <|assistant|> and there"] * 20
    if form == "model":
        SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_prefix=str(directory / "tokenizer"),
            vocab_size=300, model_type="bpe", byte_fallback=True, hard_vocab_limit=False,
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
    else:
        tokenizer = JsonTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # no piece of two words
        tokens = ["<unk>", "<s>", "</s>"]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.pre_tokenizer = None
        spaces = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        state = json.loads(tokenizer.to_str())
        vocab = state["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        (directory / "tokenizer.json").write_text(json.dumps(state))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def training_config(family: str, **changes: object) -> TrainingConfig:
    values = {
        "epochs": 1, "batch_tokens": 64, "lr": 3e-3, "unroll_from": 0.0, "feature_noise": 0.0,
        "draft_vocab_size": 200, "max_length": 64, "validation": 0.0,
    }  # fmt: skip
    return TrainingConfig(head=family, **(values | changes))


def random_data(rows: int, seed: int = 0, longest: int = 40) -> list[Conversation]:
    generator = torch.Generator().manual_seed(seed)
    data = []
    for row in range(rows):
        length = longest - 5 * (row % 4)
        ids = torch.randint(2, 200, (length,), generator=generator).tolist()
        data.append(Conversation(ids, [(6, length)]))
    return data


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def arguments(target: Path, data: Path | str, out: Path, *options: object) -> list[str]:
    fixed = ("--checkpoint_path", target, "--data", data, "--out", out)
    return [str(value) for value in (*fixed, *SMALL, *options)]


def train(target: Path, data: Path | str, out: Path, *options: object) -> Path:
    """Run the command to its end; the head's file."""
    assert train_draft.main(arguments(target, data, out, *options)) == 0
    return out / train_draft.HEAD_FILE


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(path).tensors())


def same_tensors(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def complaint(capsys: pytest.CaptureFixture, *options: object) -> str:
    """Run the command as a user does: exit code 2 and one line."""
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: train_draft.main([str(x) for x in options]))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stopped.value.code == 2 and len(lines) == 1
    return lines[0]
