"""4-bit weights as others publish them: GPTQ, AWQ (gemm) and compressed-tensors (W4A16), in groups.

A packed linear X is shown as X.weight, X.scales and X.zeros, as talon/kernels/linear.py stores
int4, so that a conversion reads them like any other tensor. Nothing is rounded again: a weight is
(step - point) * scale there and (step - 8) * scale + zero here, with scales and zeros in fp32:
equal bit for bit where their scales have 16 bits. Leaves out: other bits, activations in few bits,
and inputs that were sorted into groups by importance (desc_act, actorder)."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from talon.checkpoint import DTYPES, TensorSpec
from talon.formats.hf_folder import Conversion, HFFolder, Output
from talon.kernels.linear import GROUPSIZES, pack_int4
from talon.settings import Settings

PARTS = ("weight", "scales", "zeros")

ADVICE = "convert the model it was made from, in float32, float16 or bfloat16, then quantize.py"


class Packing(NamedTuple):
    """How a method stores a linear. Eight 4-bit numbers share an int32, the first one lowest."""

    groupsize: int
    steps: str
    scales: str
    points: str | None  # eight outputs a word; None: every point is 8
    turned: bool = True  # [in, out] instead of [out, in]
    along: int = 1  # a word of steps holds eight inputs (1) or eight outputs (0)
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)  # where in a word its 1st, 2nd, ... number is
    offset: int = 0  # what a stored point lacks
    index: str = "g_idx"  # the group of each input; where present, it must be that of its place
    sorts: bool = False  # whether config.json says that inputs were sorted


def read_packing(config: Settings) -> Packing:
    """What quantization_config says; ValueError names the first thing that is not supported."""
    given = config.section("quantization_config")
    method = given.values.get("quant_method")
    if method == "gptq":
        only(given, "checkpoint_format", None, "gptq", "gptq_v2")
        only(given, "dynamic", None, {})
        offset = int(given.values.get("checkpoint_format") != "gptq_v2")
        names, sorts = ("qweight", "scales", "qzeros"), given.flag("desc_act")
        return Packing(read_groups(given), *names, offset=offset, sorts=sorts)
    if method == "awq":
        only(given, "version", None, "gemm", "GEMM")
        only(given, "zero_point", None, True)
        names, order = ("qweight", "scales", "qzeros"), (0, 4, 1, 5, 2, 6, 3, 7)
        return Packing(read_groups(given), *names, along=0, order=order)
    if method != "compressed-tensors":
        raise ValueError(
            f"{given.where}: quant_method is {method!r}; supported: gptq, awq and "
            f"compressed-tensors in 4 bits; {ADVICE}"
        )
    only(given, "format", "pack-quantized")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        only(given, key, None, {})
    groups = given.section("config_groups")
    if len(groups.values) != 1:
        given.refuse("config_groups", f"a single group of layers; {ADVICE}")
    group = groups.section(next(iter(groups.values)))
    only(group, "input_activations", None)
    weights = group.section("weights")
    for key, allowed in (("type", "int"), ("strategy", "group")):
        only(weights, key, None, allowed)
    points = None if weights.flag("symmetric", True) else "weight_zero_point"
    names = ("weight_packed", "weight_scale", points)
    sorts = weights.values.get("actorder") not in (None, False, "weight", "static")
    size = read_groups(weights, "num_bits")
    return Packing(size, *names, turned=False, index="weight_g_idx", sorts=sorts)


def only(settings: Settings, key: str, *allowed: Any) -> Any:
    """A value that is one of those allowed."""
    value = settings.values.get(key)
    if value not in allowed:
        named = ", ".join(str(each) for each in allowed if each is not None)
        settings.refuse(key, f"{named or 'none'}; {ADVICE}")
    return value


def read_groups(settings: Settings, bits: str = "bits") -> int:
    """The size of the groups, of weights in 4 bits."""
    only(settings, bits, 4)
    return only(settings, "group_size", *GROUPSIZES)


def numbers_in(words: Tensor, along: int, order: tuple[int, ...]) -> Tensor:
    """uint8: the eight numbers of each int32 of a matrix, one after another along a dimension."""
    parts = [(words >> 4 * place & 15).to(torch.uint8) for place in order]
    return torch.stack(parts, along + 1).flatten(along, along + 1)


class PackedFolder(HFFolder):
    """A directory whose packed linears read as if they were stored in our own form."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.packing = packing = read_packing(self.config)
        del self.config.values["quantization_config"]  # understood: the forward is a plain one
        ending = f".{packing.steps}"
        self.packed = {n.removesuffix(ending) for n in self.specs if n.endswith(ending)}
        if not self.packed:
            raise ValueError(f"{self.path} holds no {ending[1:]}, in spite of its config.json")
        for layer in sorted(self.packed):
            self._show(layer)
        self._drop_zero_biases()
        self.close()

    def _show(self, layer: str) -> None:
        """Put the specs of our three tensors in place of those of the packing, which must fit."""
        p = self.packing
        shape = list(self.specs[f"{layer}.{p.steps}"].shape[:: -1 if p.turned else 1])
        if len(shape) == 2:
            shape[p.along] *= 8
        else:
            shape = [0, 0]
        outputs, inputs = shape
        groups = inputs // p.groupsize
        packed = [outputs, inputs // 8] if p.along else [outputs // 8, inputs]
        wanted = {p.steps: packed, p.scales: [outputs, groups]}
        if p.points:
            wanted[p.points] = [outputs // 8, groups]
        for part, expected in wanted.items():
            spec = self.specs.pop(f"{layer}.{part}", None)
            dtypes = DTYPES.values() if part == p.scales else (torch.int32,)
            expected = tuple(expected[:: -1 if p.turned else 1])
            if spec is None or spec.shape != expected or spec.dtype not in dtypes:
                found = f"{spec.dtype} {list(spec.shape)}" if spec else "missing"
                raise ValueError(
                    f"{self.path}: {layer}.{part} is {found}, but groups of {p.groupsize} mean "
                    f"{'int32' if part != p.scales else 'floats'} {list(expected)}; weights and "
                    "config.json do not belong together"
                )
        if inputs % p.groupsize or not inputs:
            raise ValueError(
                f"{self.path}: {layer} has {inputs} inputs, no groups of {p.groupsize}"
            )
        self._check_extras(layer, torch.arange(inputs) // p.groupsize, [outputs, inputs])
        twice = [f"{layer}.{part}" for part in PARTS if f"{layer}.{part}" in self.specs]
        if twice:
            raise ValueError(f"{self.path} holds {twice[0]} beside {layer}.{p.steps}: keep one")
        for part in PARTS:
            self.specs[f"{layer}.{part}"] = TensorSpec(torch.float32, (outputs, groups))
        self.specs[f"{layer}.weight"] = TensorSpec(torch.uint8, (outputs, inputs // 2))
        self.decoded |= {f"{layer}.{part}" for part in PARTS}

    def _check_extras(self, layer: str, groups: Tensor, shape: list[int]) -> None:
        """Tensors that may only say what is so anyway."""
        index, size = f"{layer}.{self.packing.index}", f"{layer}.weight_shape"
        has_index = self.specs.pop(index, None) is not None
        if self.packing.sorts if not has_index else self.read(index).tolist() != groups.tolist():
            raise ValueError(
                f"{self.path}: {index} is {'not in order' if has_index else 'missing'}: inputs "
                f"sorted into groups (desc_act, actorder) are not supported; {ADVICE}"
            )
        if self.specs.pop(size, None) is not None and self.read(size).tolist() != shape:
            raise ValueError(f"{self.path}: {size} is not {shape}; download the weights again")

    def _drop_zero_biases(self) -> None:
        """Some programs store a bias for every linear, of zeros where the model has none."""
        biases: dict[str, list[str]] = {}
        for layer in self.packed:
            if f"{layer}.bias" in self.specs:
                biases.setdefault(layer.rpartition(".")[2], []).append(f"{layer}.bias")
        for names in biases.values():
            if not any(self.read(name).any() for name in names):
                for name in names:
                    del self.specs[name]

    def read(self, name: str) -> Tensor:
        """One tensor; of a packed linear, in our form."""
        if name not in self.decoded:
            return super().read(name)
        p, (layer, _, part) = self.packing, name.rpartition(".")
        read = super().read

        def stored(part: str) -> Tensor:
            return read(f"{layer}.{part}").t() if p.turned else read(f"{layer}.{part}")

        if part == "weight":
            steps = numbers_in(stored(p.steps), p.along, p.order)
            return pack_int4(steps.contiguous(), p.groupsize)
        scales = stored(p.scales).float().contiguous()
        if part == "scales":
            return scales
        if p.points is None:
            return torch.zeros_like(scales)
        # 15 + 1 is 0, as in the kernels of those who store a point less one.
        points = numbers_in(stored(p.points), 0, p.order) + p.offset & 15
        return (8 - points.float()) * scales

    def arrange(self, conversion: Conversion) -> None:
        """Write packed linears in their three parts, and say so in the metadata."""
        outputs, layers = [], {}
        for output in conversion.outputs:
            sources = {name.removesuffix(".weight"): shape for name, shape in output.parts.items()}
            if output.name.endswith(".weight") and self.packed & sources.keys():
                layer = output.name.removesuffix(".weight")
                layers[layer] = "int4"
                for part, share in zip(PARTS, (2, *[self.packing.groupsize] * 2), strict=True):
                    parts = {f"{s}.{part}": (n, k // share) for s, (n, k) in sources.items()}
                    outputs.append(Output(f"{layer}.{part}", parts))
            else:
                outputs.append(output)
        conversion.outputs = outputs
        size = self.packing.groupsize
        conversion.quantization = {"mode": "int4", "groupsize": size, "layers": layers}
