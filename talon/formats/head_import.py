"""EAGLE heads as others publish them: recognised by their tensors and read strictly.

SafeAILab (EAGLE-1, -2, -3), SpecForge, speculators, NVIDIA ModelOpt and AngelSlim directories. A
head that is misread still decodes, only slowly, so nothing is guessed: a flag without its tensor, a
tensor without its flag and two statements that disagree are errors that name both. Used by
convert_hf_checkpoint.py; head_export.py is the way back. Leaves out heads of several layers,
sliding windows and quantised heads."""

import re

import torch
from torch import Tensor

from eagle_draft import DraftConfig
from talon.formats.hf_config import NEUTRAL_VALUES, check_neutral, read_layer, read_rope
from talon.formats.hf_folder import QUANTISED, Conversion, HFFolder, Output, layer_outputs
from talon.settings import listed

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Prefixes under which the formats store the same things; ours is the second.
ALIASES = {
    "midlayer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "draft_id_to_target_id": "d2t",
}

UNSUPPORTED_TENSORS = {
    r"layers\.[1-9]": "a head of several layers",
    QUANTISED: "a quantised head",
    r"lora_": "an adapter",
    r"_a_proj|_b_proj": "a head with latent attention (MLA)",
    r"experts": "a head with a mixture of experts",
}

# Switches of a forward that we lack.
FALSE_FLAGS = dict.fromkeys(("eh_proj_before_attn", "return_hidden_post_norm"), (False,))

EAGLE1_NORMS = (
    r"^layers\.0\.(input_layernorm|hidden_norm)\.|^(input_norm|norm|[^.]*_layernorm|fc_norm\.\d+)\."
)


def canonical(name: str) -> str:
    """A published tensor name in the one spelling used below."""
    name = name.removeprefix("model.")
    for published, ours in ALIASES.items():
        if name.startswith(published):
            return ours + name[len(published) :]
    return name


def is_head(folder: HFFolder) -> bool:
    """Whether the tensors are a head's, whatever config.json calls the architecture."""
    names = {canonical(name) for name in folder.specs}
    return bool(names & {"fc.weight", "d2t", "layers.0.hidden_norm.weight"}) or any(
        name.startswith("midlayer.") for name in folder.specs
    )


def canonical_names(folder: HFFolder) -> dict[str, str]:
    """Name in the folder of each canonical tensor; refuses names that say "not supported"."""
    names: dict[str, str] = {}
    for name in folder.specs:
        short = canonical(name)
        if short in names:
            raise ValueError(f"{folder.path} holds both {names[short]} and {name}; keep one")
        for pattern, what in UNSUPPORTED_TENSORS.items():
            if re.search(pattern, short):
                raise ValueError(f"{folder.path} is {what} ({name}); that is not supported")
        names[short] = name
    if "fc.weight" not in names:
        raise ValueError(f"{folder.path} has no fc.weight, so it is no complete EAGLE head")
    return names


class HeadReader:
    """A head's directory under inspection: its tensors, and its config.json, flat or nested. A key
    that is stated in several places must say the same in all of them."""

    def __init__(self, folder: HFFolder) -> None:
        self.folder, self.config, self.where = folder, folder.config, folder.path
        self.names = canonical_names(folder)
        self.notes: list[str] = []
        nested = ("transformer_layer_config", "speculators_model_type")
        self.nested = any(key in self.config for key in nested)
        self.layer = self.config.section("transformer_layer_config") if self.nested else self.config
        self.eagle = self.config.section("eagle_config")
        self.places = [self.config, self.eagle] + [self.layer] * self.nested
        self.architectures = [str(name) for name in self.config.items("architectures")]
        self.check_supported()
        self.dim = self.layer.integer("hidden_size")
        self.fc_shape = self.shape("fc.weight")
        if len(self.fc_shape) != 2 or self.fc_shape[0] != self.dim:
            raise ValueError(
                f"{self.where}: fc.weight is {list(self.fc_shape)}, but hidden_size is {self.dim}; "
                "weights and config.json do not belong together"
            )
        has_norm = "layers.0.hidden_norm.weight" in self.names
        self.family = "eagle3" if has_norm or self.fc_shape[1] != 2 * self.dim else "eagle1"

    def shape(self, name: str) -> tuple[int, ...]:
        return self.folder.specs[self.names[name]].shape

    def read(self, name: str) -> Tensor:
        return self.folder.read(self.names[name])

    def agreed(self, key: str, values: list, default: object = None) -> object:
        if any(value != values[0] for value in values):
            stated = " and ".join(map(str, values))
            raise ValueError(f"{self.config.where}: {key} is stated as {stated}; keep one of them")
        return values[0] if values else default

    def flag(self, key: str, default: bool = False) -> bool:
        return self.agreed(key, [p.flag(key) for p in self.places if key in p], default)

    def integer(self, key: str, default: int | None = None) -> int | None:
        return self.agreed(key, [p.integer(key) for p in self.places if key in p], default)

    def check_supported(self) -> None:
        """Refuse by name whatever in the configuration changes the forward in a way we lack."""
        family = self.config.string("speculators_model_type", "eagle3")
        if family not in ("eagle", "eagle3"):
            self.config.refuse("speculators_model_type", "eagle, eagle3")
        for place in self.places:
            neutral = NEUTRAL_VALUES | FALSE_FLAGS
            if not place.flag("use_sliding_window", True):
                neutral.pop("sliding_window")
            check_neutral(place, neutral)
        if not self.eagle.flag("use_aux_hidden_state", True):
            self.eagle.refuse("use_aux_hidden_state", "true")

    def published_format(self) -> str:
        """Whose layout it is, for the head card; decisions are taken from keys and tensors."""
        if self.nested:
            return "speculators"
        if self.family == "eagle1":
            return "eagle"
        layers = any(name.startswith("layers.0.") for name in self.folder.specs)
        if "eagle_config" in self.config and layers:
            return "modelopt"
        if "Eagle3LlamaForCausalLM" in self.architectures:
            return "angelslim"
        return "specforge" if "LlamaForCausalLMEagle3" in self.architectures else "eagle"

    def features(self) -> tuple[int, tuple[int, ...] | None]:
        """(width of one target feature, layers if stated), from the width of fc.weight."""
        stated, width = self.integer("target_hidden_size", self.dim), self.fc_shape[1]
        if self.family == "eagle1":
            bad = [name for name in self.names if re.search(EAGLE1_NORMS, name)]
            if bad:
                raise ValueError(f"{self.where}: EAGLE-1 with norms ({listed(bad)}); not supported")
            family = self.config.values.get("speculators_model_type")
            if stated != self.dim or family == "eagle3":
                raise ValueError(
                    f"{self.where}: fc.weight [{self.dim}, 2 x {self.dim}] is an EAGLE-1 head's, "
                    "config.json an EAGLE-3 head's; they do not belong together"
                )
            return self.dim, None
        layers = self.layer_ids()
        levels = len(layers) if layers else 3
        if width != levels * stated:
            raise ValueError(
                f"{self.where}: fc.weight takes {width} inputs; an EAGLE-1 head of hidden_size "
                f"{self.dim} has {2 * self.dim}, an EAGLE-3 head with {levels} features of "
                f"{stated} has {levels * stated}: check target_hidden_size and {LAYER_IDS}"
            )
        return stated, layers

    def layer_ids(self) -> tuple[int, ...] | None:
        """Stated feature layers as HF hidden_states indices (a layer's residual INPUT), or None.
        SpecForge and ModelOpt number a layer's OUTPUT and keep the list in eagle_config; so does,
        by the rule SGLang uses, any list that starts with 1. Both are one less than ours."""
        found = []
        for place in (self.config, self.eagle):
            ids = place.values.get(LAYER_IDS)
            if ids is None:
                continue
            good = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
            if not good or len(set(ids)) < len(ids):
                place.refuse(LAYER_IDS, "a list of different layers, each at least 0")
            is_output = ids[0] == 1 or (place is self.eagle and not self.nested)
            found.append(tuple(i + is_output for i in ids))
        return self.agreed(LAYER_IDS, found)

    def vocabularies(self) -> tuple[int, int]:
        """(the target's, the draft's), stated or read off the tensors, which must all agree."""
        vocab = self.integer("vocab_size")
        if vocab is None:
            raise ValueError(f"{self.config.where} has no vocab_size; it must be the target's")
        sizes = {"draft_vocab_size": self.integer("draft_vocab_size")}
        for name in ("lm_head.weight", "d2t"):
            # EAGLE-1 and full-vocabulary EAGLE-3 heads may carry an unused map of any length.
            if name in self.names and not (name == "d2t" and vocab in sizes.values()):
                sizes[name] = next(iter(self.shape(name)), 0)
        stated = {key: size for key, size in sizes.items() if size is not None}
        size = next(iter(stated.values()), vocab)
        if any(other != size for other in stated.values()):
            counts = ", ".join(f"{key}: {count}" for key, count in stated.items())
            raise ValueError(f"{self.where}: draft vocabulary sizes disagree ({counts})")
        if size > vocab:
            raise ValueError(f"{self.where}: draft vocabulary {size} exceeds vocab_size {vocab}")
        if size < vocab and "d2t" not in self.names:
            raise ValueError(
                f"{self.where}: the draft vocabulary has {size} of {vocab} tokens and d2t is "
                "missing, so its ids mean nothing; get the complete head"
            )
        if "t2d" in self.names and self.shape("t2d") != (vocab,):
            shape = list(self.shape("t2d"))
            raise ValueError(f"{self.where}: t2d has shape {shape}, but vocab_size is {vocab}")
        return vocab, size

    def fc_bias(self) -> bool:
        """Whether fc has a bias: the tensor decides, for the key is often absent or wrong."""
        present = "fc.bias" in self.names
        for key in ("bias", "fusion_bias") if self.family == "eagle1" else ():
            stated = self.config.flag(key, None)
            if stated and not present:
                raise ValueError(f"{self.config.where}: {key} is true, but there is no fc.bias")
            if stated is False and present:
                self.notes.append(f"{key} is false in config.json, but fc.bias is there: used it")
        return present

    def norms(self) -> dict[str, bool]:
        """The EAGLE-3 norm variants; a flag needs its tensor and a tensor its flag."""
        where = self.config.where
        if self.family == "eagle1":
            for flag in (*NORM_FLAGS, "layernorms", "add_para_norm"):
                if self.flag(flag):
                    raise ValueError(f"{where}: {flag} is true; an EAGLE-1 head has no such norm")
            return {}
        flags = {
            # The default is what vLLM assumes.
            "norm_before_residual": self.flag("norm_before_residual", self.nested),
            "norm_before_fc": self.flag("norm_before_fc"),
            "fc_norm": self.flag("fc_norm") or self.flag("use_aux_norm"),
            "norm_output": self.flag("norm_output") and self.nested,
        }
        # The same key, another meaning: flat (SpecForge) it says that lm_head reads the normed
        # hidden, which every head here does; nested (speculators) that the next level does.
        if not self.nested and not self.flag("norm_output", True):
            raise ValueError(
                f"{where}: norm_output is false, which in this layout drops the final norm; remove "
                "the key if the head has its norm"
            )
        if not self.nested and self.flag("norm_output"):
            self.notes.append("norm_output is true: read as SpecForge's norm before lm_head")
        for flag, tensor in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
            present = any(name.startswith(tensor) for name in self.names)
            if flags[flag] != present:
                raise ValueError(
                    f"{self.where}: {flag} is {str(flags[flag]).lower()} in config.json, but the "
                    f"tensor {tensor}* is {'there' if present else 'missing'}; one of them is wrong"
                )
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise ValueError(f"{where}: norm_before_fc and fc_norm exclude each other")
        return flags


def plan_head(folder: HFFolder) -> Conversion:
    """Decide everything about a head: its family, its config and the origin of every tensor."""
    reader = HeadReader(folder)
    names, notes = reader.names, reader.notes
    target_dim, layers = reader.features()
    vocab, draft_vocab = reader.vocabularies()
    source = read_rope(reader.layer)[2]
    if reader.nested and source in reader.layer.values:
        source = f"transformer_layer_config.{source}"
    config = DraftConfig(
        family=reader.family, **read_layer(reader.layer, names, notes), vocab_size=vocab,
        draft_vocab_size=draft_vocab, target_dim=target_dim, rope_source=source,
        feature_layers=layers, fc_bias=reader.fc_bias(), **reader.norms(),
        own_embedding="embed_tokens.weight" in names, own_output="lm_head.weight" in names,
        source_format=reader.published_format(),
    )  # fmt: skip
    check_borrowed(folder, config, notes)
    has_map = "d2t" in names and draft_vocab < vocab
    outputs = [
        Output(o.name, {names.get(name, name): shape for name, shape in o.parts.items()})
        for o in head_outputs(config, reader.fc_shape[1], has_map)
    ]
    architecture = ", ".join(reader.architectures) or "unnamed"
    conversion = Conversion(folder, "draft", config, architecture, outputs, notes)
    conversion.ignored = {names[key] for key in ("d2t", "t2d") if key in names}
    conversion.check()
    if has_map:
        check_draft_vocabulary(reader, vocab)
    elif "d2t" in names and bool(reader.read("d2t").any()):
        notes.append("d2t is not zero, but the draft vocabulary is the whole one: ignored it")
    return conversion


def check_borrowed(folder: HFFolder, config: DraftConfig, notes: list[str]) -> None:
    """What the head lacks must be something that the target can lend it."""
    if not config.own_embedding and config.dim != config.target_dim:
        raise ValueError(
            f"{folder.path} has no embed_tokens.weight and cannot borrow the target's: hidden_size "
            f"is {config.dim}, target_hidden_size {config.target_dim}"
        )
    if config.family == "eagle3" and not config.own_output:
        if config.draft_vocab_size < config.vocab_size or config.dim != config.target_dim:
            raise ValueError(
                f"{folder.path} has no lm_head.weight and cannot borrow the target's: the head is "
                f"{config.dim} wide with {config.draft_vocab_size} tokens, the target "
                f"{config.target_dim} with {config.vocab_size}"
            )
        notes.append("the head has no lm_head: it borrows the target's")
    if not config.own_embedding:
        notes.append("the head has no embedding: it borrows the target's")


def head_outputs(c: DraftConfig, fc_width: int, has_map: bool) -> list[Output]:
    """Every tensor of our file, in the order of the forward, by canonical source names."""
    eagle3 = c.family == "eagle3"
    outputs = [Output("fc.weight", {"fc.weight": (c.dim, fc_width)})]
    if c.fc_bias:
        outputs.append(Output("fc.bias", {"fc.bias": (c.dim,)}))
    outputs += layer_outputs("layer", "layers.0", c, 2 * c.dim if eagle3 else c.dim)
    norms = {"layer.ffn_norm": ("layers.0.post_attention_layernorm", c.dim)}
    if eagle3:
        norms["layer.embed_norm"] = ("layers.0.input_layernorm", c.dim)
        norms["layer.hidden_norm"] = ("layers.0.hidden_norm", c.dim)
        norms["norm"] = ("norm", c.dim)
    if c.norm_before_fc:
        norms["input_norm"] = ("input_norm", fc_width)
    for i in range(fc_width // c.target_dim if c.fc_norm else 0):
        norms[f"fc_norm.{i}"] = (f"fc_norm.{i}", c.target_dim)
    outputs += [Output(f"{o}.weight", {f"{n}.weight": (size,)}) for o, (n, size) in norms.items()]
    if c.own_output:
        outputs.append(Output("output.weight", {"lm_head.weight": (c.draft_vocab_size, c.dim)}))
    if has_map:
        outputs.append(Output("d2t", {"d2t": (c.draft_vocab_size,)}))
    if c.own_embedding:
        embedding = {"embed_tokens.weight": (c.vocab_size, c.dim)}
        outputs.append(Output("tok_embeddings.weight", embedding))
    return outputs


def check_draft_vocabulary(reader: HeadReader, vocab: int) -> None:
    """d2t must be offsets that lead to different ids of the vocabulary, the same that t2d marks."""
    stored, where = reader.read("d2t"), reader.where
    if stored.dtype.is_floating_point or stored.dtype == torch.bool:
        raise ValueError(f"{where}: d2t is {stored.dtype}; it must hold integers")
    d2t = stored.to(torch.int64)
    mask = reader.read("t2d") != 0 if "t2d" in reader.names else None

    def fits(ids: Tensor) -> bool:
        inside = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
        return inside and (mask is None or bool(mask[ids].all()) and int(mask.sum()) == len(ids))

    as_offsets, as_ids = fits(torch.arange(len(d2t)) + d2t), fits(d2t)
    if as_offsets and as_ids and mask is None and len(d2t) > 1:
        reader.notes.append("d2t could also be read as absolute ids; it was read as offsets")
    if as_ids and not as_offsets:
        raise ValueError(f"{where}: d2t holds absolute token ids: subtract its index from each")
    if not as_offsets:
        raise ValueError(
            f"{where}: d2t is no map into the vocabulary: draft id + d2t must give different ids "
            f"from 0 to {vocab - 1}" + (", the ones that t2d marks" if mask is not None else "")
        )
