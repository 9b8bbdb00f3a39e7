"""What a round launches on an RTX 3090, counted on a machine without a GPU or a driver.

    python scripts/count_kernels.py --mode int8 --tree dynamic:nodes=60,levels=8,top_k=10

Needs a CUDA build of torch with its Triton (`pip install torch`). Tensors are fake; Dynamo,
AOTAutograd and Inductor are real and compile what one real `Decoder.round` calls; only the loading
of the generated module is stopped. Of each region: kernels of Triton, calls of cuBLAS, operators of
Talon's (with the launches inside them) and of ATen's, and buffers as large as the KV cache. Leaves
out: what cuBLAS chooses, the kernels inside an operator of ATen's, any time.
"""

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

# A cached module would not be generated again.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget

import talon.decoder
from eagle_draft import DraftConfig, DraftHead
from model import ModelConfig, Transformer
from talon.decoder import Decoder
from talon.kernels import gpu_layers
from talon.kernels.gpu_layers import put_on_gpu
from talon.kernels.linear import swap_linears
from talon.sampling import SamplingConfig
from talon.trees import Tree, parse_tree

CARD = SimpleNamespace(  # what Inductor and Triton ask of a device
    name="NVIDIA GeForce RTX 3090", major=8, minor=6, multi_processor_count=82, warp_size=32,
    total_memory=24 << 30, max_threads_per_multi_processor=1536, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152, L2_cache_size=6 << 20,
    shared_memory_per_block_optin=101376, shared_memory_per_multiprocessor=102400, gcnArchName="",
)  # fmt: skip
LAYERS = 32  # of the model that is reckoned with; fewer are compiled, since one block serves all
INSIDE = {"talon.linear": 1, "talon.ready": 1, "talon.attend_tree": 2, "talon.best": 1}  # launches
KINDS = {"sample": (0.8, 0, 1.0), "filter": (0.8, 50, 0.9), "greedy": (0.0, 0, 1.0)}


class Generated(BaseException):
    """The module is generated; to run it would take a GPU."""


class Launches(TorchDispatchMode):
    """Counts the eager operators between regions that launch something; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function.overloadpacket)
        if self.on and name.startswith("aten.") and not function.is_view and name != "aten.empty":
            self.counts[name.removeprefix("aten.")] += 1
        return function(*args, **(kwargs or {}))


def answer(value: object):
    return lambda *args, **options: value


def pretend() -> None:
    """Answer whatever would otherwise ask the driver, and stop where a module would be loaded."""
    from torch._dynamo import device_interface
    from torch._inductor import config, graph
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers

    torch._C._ensureCUDADeviceGuardSet()  # without a driver, device guards do nothing
    FakeTensorMode.avoid_device_init = True
    answers = {
        "get_device_properties": CARD, "get_device_capability": (8, 6), "is_available": True,
        "device_count": 1, "current_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "synchronize": None, "_lazy_init": None, "is_current_stream_capturing": False,
        "set_rng_state": None, "get_rng_state": torch.zeros(16), "graph_pool_handle": (0, 0),
        "Stream": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, answer(value))
        if hasattr(device_interface.CudaInterface, name.lstrip("_")):
            setattr(device_interface.CudaInterface, name.lstrip("_"), staticmethod(answer(value)))
    device_interface.caching_worker_device_properties["cuda"] = [CARD]
    device_interface.caching_worker_current_devices["cuda"] = 0
    torch.cuda.Event = type("Event", (), {"__init__": answer(None), "record": answer(None)})
    target = answer(GPUTarget("cuda", 86, 32))
    driver = SimpleNamespace(get_current_target=target, get_current_device=answer(0))
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu, config.compile_threads = answer(None), 1
    config.use_static_cuda_launcher = config.shape_padding = False
    folder = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def fold(self, node):  # some one-element tensors are computed for real: on the CPU, then
        kwargs = node.kwargs
        node.kwargs = kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") else {})
        value, node.kwargs = deduce(self, node), kwargs
        return value

    def stop(self):
        raise Generated(self.codegen()[0].value)

    folder._deduce_value, graph.GraphLowering._compile_to_module = fold, stop


def count(source: str, cache_slots: int) -> dict[str, Counter]:
    """Launches in each function of a generated module: its subgraphs, then `call`, the whole."""
    parts = re.split(r"^ *def (\w+)\((?:self, )?args\):\n", source, flags=re.M)
    tables: dict[str, Counter] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        body = body.split("\ndef get_args")[0]
        table = Counter(f"triton {k}" for k in re.findall(r"(\w+)\.run\(", body))
        table.update(f"cublas {k}" for k in re.findall(r"extern_kernels\.(\w+)\(", body))
        for operator in re.findall(r"torch\.ops\.(\w+\.\w+)\.\w+\(", body):
            kind = "talon" if operator in INSIDE else "aten"
            table[f"{kind} {operator}"] += INSIDE.get(operator, 1)
        table.update(f"aten {k}" for k in re.findall(r"\.(copy_)\(", body))
        table["KV"] = len(re.findall(rf"empty_strided_cuda\(\([^)]*\b{cache_slots}\b", body))
        for other, inner in list(tables.items()):
            table[f"calls {other}"] = calls = len(re.findall(rf"= {other}\(", body))
            table.update({key: calls * value for key, value in inner.items()})
        tables[name] = +table
    return tables


def quantise(module: nn.Module, mode: str) -> None:
    """Give a module of fake tensors the layers that a file in a mode has."""
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    swap_linears(module, {"groupsize": 128, "layers": dict.fromkeys(names, mode)})
    for name in names:
        layer = module.get_submodule(name)
        for part, tensor in list(layer.named_buffers()):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            layer.register_buffer(part, fake)


def build(args: argparse.Namespace, tree: Tree) -> Decoder:
    """A decoder of fake weights of LLaMA-3.1-8B's shape, and a head that borrows from it."""
    dim = args.dim
    sizes = (128256, dim, args.layers, dim // 128, max(1, dim // 512), 128, dim * 7 // 2)
    config = ModelConfig(*sizes, 1e-5, 8192, 500000.0)
    fields = {
        "family": args.head, "dim": dim, "n_head": dim // 128, "n_kv_head": max(1, dim // 512),
        "head_dim": 128, "intermediate_size": dim * 7 // 2, "norm_eps": 1e-5, "target_dim": dim,
        "vocab_size": 128256, "max_seq_length": 8192, "own_output": args.head == "eagle3",
        "draft_vocab_size": 32000 if args.head == "eagle3" else 128256,
    }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        target = Transformer(config).requires_grad_(False).eval()
        head = DraftHead(
            DraftConfig(**fields, feature_layers=(2, 4, 5) if args.head == "eagle3" else None)
        )
    torch.set_default_dtype(torch.float32)
    for module, mode in ((target, args.mode), (head.requires_grad_(False).eval(), args.head_mode)):
        if mode != "bf16":
            quantise(module, mode)
        # Fake numbers cannot be looked at: a target wants its inputs smoothed, a head does not.
        smoothed = module is target
        gpu_layers.factors_of = lambda linear, on=smoothed: 1 / linear.smoothing if on else None
        put_on_gpu(module, torch.bfloat16)
    head.tok_embeddings, head.output = target.tok_embeddings, head.output or target.output
    return Decoder(target, args.context, head if tree.levels else None, tree)


def report(args: argparse.Namespace, slots: int, sources: dict, calls: Counter, eager: Counter):
    total = lambda table, kind: sum(n for key, n in table.items() if key.startswith(kind))  # noqa: E731
    kinds, nodes = ("triton", "cublas", "talon", "aten"), sum(eager.values())
    print("#", vars(args), "torch", torch.__version__, "triton", triton.__version__)
    print("region        calls triton cublas  talon   aten KV-sized | one layer of the target")
    for name, source in sources.items():
        tables = count(source, slots)
        table, layer = tables.pop("call"), Counter()
        for other, inner in tables.items():
            if table[f"calls {other}"] >= args.layers - 1:
                layer = inner
                table.update({k: (LAYERS - args.layers) * n for k, n in inner.items()})
        columns = [total(table, kind) for kind in kinds]
        parts = [f"{total(layer, kind)} {kind}" for kind in kinds if layer]
        parts += [f"({n} {k[5:]})" for k, n in (layer or table).items() if k.startswith("aten")]
        print(f"{name:13} {calls[name]:5}", *(f"{n:6}" for n in columns), end=" ")
        print(f"{table['KV']:8} |", ", ".join(parts))
        nodes += calls[name] * sum(columns)
        if args.keep:
            Path(args.keep, f"{args.mode}_{name}.py").write_text(source, encoding="utf-8")
    print(f"between regions: {sum(eager.values())} {dict(eager)}")
    print(f"{nodes} launches a round, with {LAYERS} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options = {
        "mode": "bf16", "head_mode": "bf16", "head": "eagle3", "kind": "greedy", "dim": 4096,
        "tree": "dynamic:nodes=60,levels=8,top_k=10", "layers": 7, "context": 1024, "keep": "",
    }  # fmt: skip
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    args = parser.parse_args()
    pretend()
    sources: dict[str, str] = {}
    calls, between, mode = Counter(), Launches(), FakeTensorMode()
    compile_region = talon.decoder.compile_region

    def region(function):
        compiled, name = compile_region(function), function.__name__

        def call(*given):
            between.on, calls[name] = False, calls[name] + 1
            if name not in sources:
                try:
                    with _disable_current_modes(), mode:
                        compiled(*given)
                except Generated as module:
                    sources[name] = module.args[0]
            result = function(*given)  # eagerly, on fake tensors: what the next region is given
            between.on = True
            return result

        return call

    talon.decoder.compile_region = region
    with mode, torch.inference_mode():
        decoder = build(args, parse_tree(args.tree))
        pick = decoder.picks.by_name[SamplingConfig(*KINDS[args.kind]).pick]
        with between:
            decoder.round(decoder.at(300), pick)
    report(args, decoder.cache.rows, sources, calls, between.counts)


if __name__ == "__main__":
    main()
