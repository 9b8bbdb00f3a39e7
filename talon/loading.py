"""From files to modules: read, check, fit together.

Nothing is inferred from a name and nothing is left to chance: every parameter has its tensor, from
its own file or borrowed from the target by rule; what does not fit is refused with both numbers.
Leaves out: other projects' files (convert_hf_checkpoint.py), how much memory that takes
(talon/memory.py), decoding (talon/decoder.py)."""

import platform
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle_draft import DraftConfig, DraftHead, default_feature_layers
from model import ModelConfig, Transformer
from talon.checkpoint import DTYPES, Checkpoint, read_checkpoint
from talon.operators import choose_operators, has_gpu_operators
from talon.tokenizer import Tokenizer, find_vocabulary, load_tokenizer
from talon.trees import GPU_PRESETS, NO_TREE, PRESETS, Tree, parse_tree

# ---------------------------------------------------------------- where and how precisely


def pick_device(name: str) -> torch.device:
    """The device of that name; a GPU is made ready."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not known: give auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} is asked for, but torch finds no GPU: give --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: give auto, cpu or cuda")
    if device.type == "cuda":
        make_ready(device)
    return device


def make_ready(gpu: torch.device) -> None:
    """Settings of torch for a GPU, in this one place. Parts of a sum are not rounded to 16 bits:
    how many there are differs between one row and many, and near ties would flip. Streams and
    graphs are made on the current GPU, so this is to be it."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if gpu.index is not None:
        torch.cuda.set_device(gpu)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: on a CPU fp32, which is not slower; on a GPU bf16, or fp16 where bf16 is emulated."""
    if name not in ("auto", *DTYPES):
        raise ValueError(f"dtype {name!r} is not known: give auto, {', '.join(DTYPES)}")
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    level = torch.backends.cpu.get_cpu_capability()
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads, {level})"


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def precision_name(file: Checkpoint, dtype: torch.dtype) -> str:
    """Such as fp32, or int8/bf16."""
    mode = (file.quantization or {}).get("mode")
    return "/".join(filter(None, (mode, dtype_name(dtype))))


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Files:
    """A target's file and perhaps a head's, opened once: read, parsed and matched."""

    target: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | None  # None: there is none next to the target, and ids must do
    head: Checkpoint | None = None
    # With its feature layers resolved; a ModelConfig where a small model drafts.
    head_config: DraftConfig | ModelConfig | None = None

    def with_head(self, path: str | Path) -> "Files":
        """The same target with the head of another file; refused if it cannot belong to it."""
        head, config = read_file(path, "draft", "target")
        return replace(self, head=head, head_config=fit_head(path, config, self.config))


def open_files(target: str | Path, head: str | Path | None = None) -> Files:
    """Read the headers of both files and the tokenizer next to the target's. head: None or "none"
    without one."""
    checkpoint, config = read_file(target, "target")
    files = Files(checkpoint, config, find_tokenizer(checkpoint.path.parent, config))
    return files if head in (None, "none") else files.with_head(head)


def shared(files: Files) -> Files:
    """Of these files what this process holds, where torchrun started several."""
    if not dist.is_initialized():
        return files
    from talon.parallel import part_of  # imported under torchrun only

    target, config = part_of(files.target, files.config, files.head)
    return replace(files, target=target, config=config)


def read_file(path: str | Path, *kinds: str) -> tuple[Checkpoint, ModelConfig | DraftConfig]:
    """A file's header and its configuration. Refused is what is of none of these kinds, as a head
    where a target belongs, and metadata that the converter does not write."""
    checkpoint = read_checkpoint(path)
    kind = checkpoint.kind
    if kind not in kinds:
        flag = {"draft": "--draft_checkpoint_path", "target": "--checkpoint_path"}[kind]
        dim, vocab = checkpoint.config.get("dim"), checkpoint.config.get("vocab_size")
        raise ValueError(
            f"{path} is a {kind} (hidden size {dim}, vocabulary {vocab}) where a {kinds[0]} is "
            f"needed: give it as {flag}"
        )
    damage = f"{path} has a damaged configuration"
    try:
        config = config_class(kind, checkpoint.config).from_dict(checkpoint.config)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{damage} ({error}): convert it again") from None
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int and not (type(value) is int and value > 0):
            raise ValueError(f"{damage} ({field.name} is {value!r}): convert it again")
    return checkpoint, config


def config_class(kind: str, config: dict) -> type:
    """What parses the configuration of a file."""
    if config.get("family") == "medusa":
        from talon.drafters.medusa import MedusaConfig

        return MedusaConfig
    return {"target": ModelConfig, "draft": DraftConfig}[kind]


def fit_context(asked: int | None, config: ModelConfig, default: int = 4096) -> int:
    """The context to provide for, which the model's own limit bounds."""
    limit = config.max_seq_length
    if asked is not None and not 2 <= asked <= limit:
        raise ValueError(f"max_seq_length {asked} is not allowed: this model takes 2 to {limit}")
    return asked or min(limit, default)


def find_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer in a checkpoint's directory; None if there is none at all, for use with ids."""
    if find_vocabulary(directory) is None:
        return None
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has ids up to {tokenizer.vocab_size - 1}, but the "
            f"model's embedding only {config.vocab_size} rows: put this model's own tokenizer there"
        )
    return tokenizer


# ---------------------------------------------------------------- modules


def loaded_dtype(file: Checkpoint, name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a tensor once loaded: what is quantised stays as it is stored, for packing to change."""
    quantized = name.rpartition(".")[0] in (file.quantization or {}).get("layers", {})
    stored = file.specs[name].dtype
    return dtype if stored.is_floating_point and not quantized else stored


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    prefix: str = "",
) -> None:
    """Give every parameter of a module on the meta device its tensor: each of those under `prefix`
    goes to exactly one."""
    wanted = {prefix + name: tuple(t.shape) for name, t in module.state_dict().items()}
    found = {n: spec.shape for n, spec in checkpoint.specs.items() if n.startswith(prefix)}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{checkpoint.path} does not match its configuration ({name}: "
                f"{found.get(name, 'missing')}, not {wanted.get(name, 'unused')}): convert it again"
            )
    state = {}
    for name in wanted:
        stored = checkpoint.tensor(name)
        state[name.removeprefix(prefix)] = stored.to(device, loaded_dtype(checkpoint, name, dtype))
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def empty_module(
    kind: type[nn.Module], config: ModelConfig | DraftConfig, checkpoint: Checkpoint
) -> nn.Module:
    """A target or a head on the meta device, its quantised linears swapped in."""
    with torch.device("meta"):
        module = kind(config)
    if checkpoint.quantization:
        from talon.kernels.linear import swap_linears  # which only quantised files need

        swap_linears(module, checkpoint.quantization)
    return module


def load_target(
    files: Files, device: torch.device, dtype: torch.dtype, plain: bool = False
) -> Transformer:
    """The model of a target file, its operators those of the device, or if `plain` torch's own."""
    config, checkpoint, kind = files.config, files.target, Transformer
    if checkpoint.processes > 1:
        from talon.parallel import PartTransformer as kind
    model = empty_module(kind, config, checkpoint)
    tied = config.tied and "output.weight" not in checkpoint.specs
    if tied:
        model.output = None
    fill(model, checkpoint, device, dtype)
    if tied:
        model.output = nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")
        model.output.weight = model.tok_embeddings.weight
    if not plain:
        choose_operators(model, device, dtype)
    if checkpoint.processes > 1:
        model.connect()
    return model


def fit_head(
    path: str | Path, head: DraftConfig | ModelConfig, target: ModelConfig
) -> DraftConfig | ModelConfig:
    """The head's configuration with its feature layers resolved, if it fits this target."""
    if isinstance(head, ModelConfig):
        from talon.drafters.small_model import fit_model

        return fit_model(path, head, target)
    hidden = head.target_dim if head.family == "eagle3" else head.dim
    for what, mine, theirs in (
        ("hidden size", hidden, target.dim),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise ValueError(
                f"{path} was made for a target with {what} {mine}, but this target has {theirs}: "
                "use the head that was trained for it"
            )
    if not head.own_embedding and head.dim != target.dim:
        raise ValueError(
            f"{path} has hidden size {head.dim} and no embedding of its own, but the target's has "
            f"{target.dim}: the head file is incomplete"
        )
    if head.family != "eagle3":
        return head
    layers = head.feature_layers or default_feature_layers(target.n_layer)
    if min(layers) < 0 or max(layers) > target.n_layer:
        raise ValueError(f"{path} reads layers {list(layers)}, this target has {target.n_layer}")
    return replace(head, feature_layers=layers)


def head_mode(files: Files, device: torch.device, dtype: torch.dtype, keep: bool) -> str | None:
    """How a head's weights are held: as its file has them, or without `keep` in int8 on a GPU,
    where they bound drafting. It only guesses."""
    config, mode = files.head_config, (files.head.quantization or {}).get("mode")
    keep = keep or isinstance(config, ModelConfig)
    rounds = not keep and has_gpu_operators(device, dtype, getattr(config, "head_dim", 0))
    return mode or ("int8" if rounds else None)


def load_head(
    files: Files, model: Transformer, device: torch.device, dtype: torch.dtype, keep: bool = False
) -> nn.Module:
    """A head in the target's compute dtype; what its file lacks is borrowed from the target. Or the
    small model that drafts in its place. keep: see `head_mode`."""
    config, checkpoint = files.head_config, files.head
    if isinstance(config, ModelConfig):
        return load_target(Files(checkpoint, config, None), device, dtype)
    kind = DraftHead
    if config.family == "medusa":
        from talon.drafters.medusa import MedusaHeads as kind
    head = empty_module(kind, config, checkpoint)
    identity = "d2t" not in checkpoint.specs
    if identity and config.draft_vocab_size != config.vocab_size:
        raise ValueError(f"{checkpoint.path} has no d2t, which it needs: convert the head again")
    if identity:
        del head.d2t
    fill(head, checkpoint, device, dtype)
    if identity:
        zeros = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
        head.register_buffer("d2t", zeros)
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(f"{checkpoint.path}: d2t leads outside the vocabulary: convert it again")
    if not config.own_embedding:
        head.tok_embeddings = model.tok_embeddings
    rounds = head_mode(files, device, dtype, keep) == "int8" and not checkpoint.quantization
    if not config.own_output:  # of a quantised target it is small enough to share
        shared = identity and not (rounds and not files.target.quantization)
        head.output = model.output if shared else rows_of(model.output, ids)
    if rounds:
        from talon.kernels.linear import round_linears

        round_linears(head)
    choose_operators(head, device, dtype)
    return head


def rows_of(linear: nn.Module, ids: Tensor) -> nn.Module:
    """The target's lm_head reduced to the rows of a draft vocabulary; a quantised one stays so."""
    if hasattr(linear, "rows_of"):
        return linear.rows_of(ids)
    reduced = nn.Linear(linear.in_features, ids.shape[0], bias=False, device="meta")
    reduced.weight = nn.Parameter(linear.weight[ids], requires_grad=False)
    return reduced


def head_card(c: DraftConfig | ModelConfig) -> str:
    """What a user needs to see to know that the right head was read in the right way."""
    if isinstance(c, ModelConfig):
        size = f"{c.n_layer} layers, hidden size {c.dim}, vocabulary {c.vocab_size}"
        return f"draft model: {size}, of up to {c.max_seq_length} positions"
    if not isinstance(c, DraftConfig):
        return str(c)
    layers = c.feature_layers
    captured = "state after the final norm"
    if layers:
        outputs = [layer - 1 for layer in layers]
        captured = f"inputs of layers {list(layers)} = outputs of layers {outputs}"
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches = [name for name in (*switches, "fc_bias", "qkv_bias", "qk_norm") if getattr(c, name)]
    owned = (("embedding", c.own_embedding), ("lm_head", c.own_output))
    borrowed = [name for name, own in owned if not own]
    scaling = f" {c.rope_scaling.kind} x {c.rope_scaling.factor:g}" if c.rope_scaling else ""
    return (
        f"head: {c.family} ({c.source_format} format), features: {captured}, variants: "
        f"{', '.join(switches) or 'none'}, RoPE base {c.rope_theta:g} ({c.rope_source}){scaling}, "
        f"draft vocabulary {c.draft_vocab_size} of {c.vocab_size}, trained to {c.max_seq_length} "
        f"positions, from the target: {', '.join(borrowed) or 'nothing'}"
    )


def gpu_weights(files: Files, device: torch.device, dtype: torch.dtype) -> str | None:
    """What `fit_tree` asks for: how a target's weights are held where a GPU's operators run."""
    mode = (files.target.quantization or {}).get("mode")
    has = has_gpu_operators(device, dtype, files.config.head_dim)
    return (mode or "16 bits") if has else None


def fit_tree(
    asked: Tree | None, head: DraftConfig | ModelConfig | None, gpu: str | None = None
) -> Tree:
    """The tree to use, if the head can fill it; for None, `--tree auto`, its family's preset. gpu:
    of `gpu_weights`, such as int8, or 16 bits."""
    small, most = isinstance(head, ModelConfig), 256 if gpu else 1024
    if head is None:
        tree = asked or NO_TREE
        if tree.needs_head:
            needs = f"tree {tree.name!r} needs a head"
            raise ValueError(f"{needs}: give --draft_checkpoint_path, or --tree none or lookup:5")
    elif not small and head.family == "medusa":
        from talon.drafters.medusa import medusa_tree

        tree = medusa_tree(asked, head)
    else:
        family, ours = "model" if small else head.family, GPU_PRESETS if gpu and not small else {}
        tree = asked or parse_tree(ours.get(gpu) or ours.get(family) or PRESETS[family])
    if tree.levels > 64 or max(tree.nodes, tree.beam) > most:
        raise ValueError(f"tree {tree.name} is too large: give {most} nodes and 64 levels at most")
    size = head and (head.vocab_size if small else head.draft_vocab_size)
    if head and tree.top_k > size:
        raise ValueError(
            f"tree {tree.name} asks for {tree.top_k} children of a node, but the head's vocabulary "
            f"has {size}: lower top_k to {size} or less"
        )
    return tree
