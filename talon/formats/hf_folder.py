"""A Hugging Face model directory: its list of tensors, and one tensor at a time.

convert_hf_checkpoint.py and head_import.py say which tensors they need (`Output`) and `Conversion`
streams them. At most one weight file is open at any moment, mapped rather than read, and let go
before the next one: a conversion needs the memory of one shard and one tensor. Pickles are loaded
with weights_only=True, and an index may not lead out of the directory. Leaves out: what config.json
means, and what a target has that a head has not."""

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from talon.checkpoint import DTYPES, TensorSpec, check_file, open_safetensors, read_header
from talon.cli import one_line
from talon.settings import Settings, listed

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

# Names of tensors that only quantised checkpoints have.
QUANTISED = r"scale|qweight|qzeros|zero_point|g_idx|_packed$|_blocks$"

# A table that old checkpoints saved; ours is computed.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


@contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """`path` exists inside; the directories made for it go again when the body fails."""
    with ExitStack() as undo:
        for directory in (*reversed(path.parents), path):
            if not directory.exists():
                directory.mkdir()
                undo.callback(directory.rmdir)
        yield
        undo.pop_all()


class HFFolder:
    """An opened directory: `config`, and the spec and file of every tensor, nothing loaded."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist; give a Hugging Face directory")
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give the directory that holds it")
        self.weight_map: dict[str, str] | None = None
        self.files = self._find_files()
        self.config = Settings.read(self.path / "config.json")
        self.notes: list[str] = []
        self.decoded: set[str] = set()  # names of tensors that read in our form, not as stored
        self.close()
        self.specs: dict[str, TensorSpec] = {}
        self.file_of: dict[str, Path] = {}
        self._list_tensors()

    def _find_files(self) -> list[Path]:
        """The weight files: safetensors before .bin, one file before shards."""
        for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
            # lexists: a dangling link (an interrupted download) is named, not passed over.
            if os.path.lexists(self.path / single):
                return [self.path / single]
            if os.path.lexists(self.path / index):
                return self._read_index(self.path / index)
        for name in MEDUSA_FILES:
            if os.path.lexists(self.path / name):
                return [self.path / name]
        if (self.path / "adapter_config.json").exists():
            raise ValueError(f"{self.path} holds an adapter; merge it into its base model first")
        suffixes = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
        others = sorted(p.name for p in self.path.iterdir() if p.suffix in suffixes)
        raise FileNotFoundError(
            f"{self.path} has none of {', '.join(SINGLE_FILES + INDEX_FILES)} (weights that it "
            f"has: {listed(others) or 'none'}); download them in Hugging Face format"
        )

    def _read_index(self, index: Path) -> list[Path]:
        weight_map = Settings.read(index).section("weight_map").values
        if not weight_map:
            raise ValueError(f"{index} has no weight_map or an empty one; download it again")
        for name in weight_map.values():
            self._check_entry(index, name)
        files = [self.path / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise FileNotFoundError(f"{index} lists {listed(missing)}; download what is missing")
        self.weight_map = weight_map
        return files

    def _check_entry(self, index: Path, name: Any) -> None:
        """An index names files next to itself; a link may lead on only into the hub's cache."""
        named = isinstance(name, str) and name not in ("", ".", "..")
        if not named or any(character in name for character in "/\\\0"):
            raise ValueError(f"{index} lists {name!r}; only names of files next to it are allowed")
        real, home = (self.path / name).resolve(), self.path.resolve()
        repository = real.parent.parent
        in_cache = real.parent.name == "blobs" and (
            repository == home.parent.parent or repository.name.startswith("models--")
        )
        if real.exists() and not (real.is_relative_to(home) or in_cache) or real.is_dir():
            raise ValueError(f"{index} lists {name!r}, not a file in its directory; put it there")

    def _list_tensors(self) -> None:
        advice = "index and shards belong to different downloads"
        for file in self.files:
            for name, spec in self._specs_in(file).items():
                place = self.weight_map.get(name, "no file") if self.weight_map else file.name
                if place != file.name and not name.endswith(IGNORED_SUFFIX):
                    raise ValueError(f"{file} holds {name}, in the index in {place}; {advice}")
                self.specs[name], self.file_of[name] = spec, file
        lost = [name for name in self.weight_map or {} if name not in self.specs]
        if lost:
            file = self.path / self.weight_map[lost[0]]
            raise ValueError(f"{file} lacks {listed(lost)}, which the index promises; {advice}")
        stem, suffix = self.files[0].name.split("-")[0], self.files[0].suffix
        shards = sorted(self.path.glob(f"{stem}-*-of-*{suffix}")) if self.weight_map else []
        extra = [file.name for file in shards if file not in self.files]
        if extra:
            self.notes.append(f"ignored {listed(extra)}: not in the index")

    def _specs_in(self, file: Path) -> dict[str, TensorSpec]:
        if file.suffix == ".safetensors":
            return read_header(file)[1]
        tensors = self._open(file)
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}

    def _open(self, file: Path) -> Any:
        """A weight file, mapped, and kept open until another one is asked for."""
        if self._opened[0] != file:
            self.close()
            open_file = open_safetensors if file.suffix == ".safetensors" else load_pickle
            self._opened = (file, open_file(file))
        return self._opened[1]

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU, valid while its file is the open one."""
        content = self._open(self.file_of[name])
        return content[name] if isinstance(content, dict) else content.get_tensor(name)

    def close(self) -> None:
        """Let the open weight file go."""
        self._opened: tuple[Path | None, Any] = (None, None)


def load_pickle(file: Path) -> dict[str, Tensor]:
    """A flat dictionary of tensors from a .bin file; nothing in it is ever executed."""
    check_file(file)
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(4) == b"PK\x03\x04"
        # The old pickle layout (before torch 1.6) cannot be mapped and is read whole.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # an unpickler fed with foreign bytes may raise anything
        reason = (one_line(error) or type(error).__name__)[:160]
        raise ValueError(
            f"{file} was refused: damaged, or more than tensors ({reason}); download it again"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in content.items()
    ):
        raise ValueError(f"{file} is no flat dictionary of tensors; give a model's weight file")
    return content


@dataclass(frozen=True)
class Output:
    """One tensor of our file and the tensors, stacked along dim 0, that it is made of."""

    name: str
    parts: dict[str, tuple[int, ...]]  # name in the folder -> the shape it must have

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [*self.parts.values()]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def layer_outputs(name: str, source: str, c: Any, width: int) -> list[Output]:
    """The linears of the block `name`, fused from those of `source`, and the norms of queries and
    keys; q, k and v read `width`. c: ModelConfig | DraftConfig."""
    q, kv, inner = c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.intermediate_size
    qkv, gate_up = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner, "up_proj": inner}
    outputs = []
    for linear, block, rows, columns, bias in (
        ("attention.wqkv", "self_attn", qkv, width, c.qkv_bias),
        ("attention.wo", "self_attn", {"o_proj": c.dim}, q, c.o_bias),
        ("feed_forward.w13", "mlp", gate_up, c.dim, c.mlp_bias),
        ("feed_forward.w2", "mlp", {"down_proj": c.dim}, inner, c.mlp_bias),
    ):
        shapes = {"weight": (columns,)} | ({"bias": ()} if bias else {})
        for ending, rest in shapes.items():
            parts = {f"{source}.{block}.{part}.{ending}": (n, *rest) for part, n in rows.items()}
            outputs.append(Output(f"{name}.{linear}.{ending}", parts))
    for norm in ("q_norm", "k_norm") if c.qk_norm else ():
        part = {f"{source}.self_attn.{norm}.weight": (c.head_dim,)}
        outputs.append(Output(f"{name}.attention.{norm}.weight", part))
    return outputs


@dataclass
class Conversion:
    """Everything decided about a folder before a byte is written."""

    folder: HFFolder
    kind: str  # "target" | "draft"
    config: Any  # ModelConfig | DraftConfig
    architecture: str
    outputs: list[Output]
    notes: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)  # known and not wanted, each for a stated reason
    quantization: dict | None = None

    def check(self) -> None:
        """Strict accounting: all that is needed is there, in shape; all that is there is used."""
        specs, where = self.folder.specs, self.folder.path
        wanted = {name: shape for output in self.outputs for name, shape in output.parts.items()}
        for name, spec in specs.items():
            floats = spec.dtype in DTYPES.values() or name in self.folder.decoded
            packed = name in wanted.keys() - self.ignored and not floats
            if packed or (name not in wanted and re.search(QUANTISED, name)):
                raise ValueError(
                    f"{where}: {name} is {spec.dtype}, quantised elsewhere; convert the model in "
                    "float32, float16 or bfloat16"
                )
        missing = [name for name in wanted if name not in specs]
        if missing:
            raise ValueError(f"{where} lacks {listed(missing)}; the weights do not fit config.json")
        for name, shape in wanted.items():
            if specs[name].shape != shape:
                raise ValueError(
                    f"{where}: {name} has shape {list(specs[name].shape)}, config.json means "
                    f"{list(shape)}; weights and config.json do not belong together"
                )
        used = wanted.keys() | self.ignored
        unused = [n for n in specs if n not in used and not n.endswith(IGNORED_SUFFIX)]
        if unused:
            raise ValueError(
                f"{where} holds tensors that this {self.kind} has no use for: {listed(unused)}; "
                "this architecture is not supported, or config.json belongs to another model"
            )

    def specs(self, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
        """Specs of the file to write: floats in `dtype` (None: as they are), integers in int64."""
        specs = {}
        for output in self.outputs:
            found = {self.folder.specs[name].dtype for name in output.parts}
            wanted = torch.int64 if output.name == "d2t" else dtype
            if output.parts.keys() <= self.folder.decoded:
                wanted = None
            if wanted is None and len(found) > 1:
                raise ValueError(
                    f"{self.folder.path}: {', '.join(output.parts)} differ in dtype and are stored "
                    "as one; choose --dtype fp32, fp16 or bf16"
                )
            specs[output.name] = TensorSpec(wanted or found.pop(), output.shape)
        return specs

    def tensors(self, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """Every (name, rows) to write: the parts of a tensor one by one, so that none is built."""
        for output in self.outputs:
            dtype = specs[output.name].dtype
            for part in output.parts:
                tensor, where = self.folder.read(part), f"{self.folder.path}: {part}"
                largest = check_finite(tensor, where)
                if dtype.is_floating_point and torch.tensor(largest, dtype=dtype).isinf():
                    raise ValueError(
                        f"{where} reaches {largest:.3g}, more than {dtype} holds; use --dtype bf16 "
                        "or fp32"
                    )
                yield output.name, tensor.to(dtype)
        self.folder.close()


def check_finite(tensor: Tensor, what: str) -> float:
    """The largest magnitude in a tensor; ValueError if one of its numbers is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = max(abs(limit.item()) for limit in tensor.aminmax())
    if not math.isfinite(largest):
        raise ValueError(f"{what} holds NaN or infinity; download the weights again")
    return largest
