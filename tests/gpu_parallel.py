"""Several processes with the operators of a GPU, in Triton's interpreter: run by test_parallel.py,
which sets TRITON_INTERPRET=1. Prints the largest difference from one process, by mode."""

import sys
import tempfile
from pathlib import Path

import torch
from processes import on_processes
from tiny import random_model
from world import save

import talon.loading
from model import At, KVCache, rope_table
from quantize import quantize_checkpoint
from talon.kernels.gpu_layers import put_on_gpu
from talon.loading import load_target, open_files, shared

HALF = torch.float16
talon.loading.choose_operators = lambda module, device, dtype: put_on_gpu(module, dtype)


def logits(path: Path) -> list[list[float]]:
    """Of a tree of five nodes behind three tokens."""
    model = load_target(shared(open_files(path)), torch.device("cpu"), HALF)
    c, tree = model.config, torch.ones(5, 5, dtype=torch.bool).tril()
    cache, tokens = KVCache(c.n_layer, c.n_kv_head, 32, c.head_dim, HALF), torch.arange(5)
    torch.manual_seed(0)
    # Every key/value head holds the same, whichever process it belongs to.
    cache.data[:, :, :, :3] = torch.randn(c.n_layer, 2, 1, 3, c.head_dim)
    at, table = At(torch.tensor([3]), torch.arange(32)), rope_table(32, c.head_dim, 1e4, None)
    with torch.inference_mode():
        place = model.place(table, tokens + 3, tokens + 3, at, tree)
        return model.output(model(tokens, place, cache)[0]).tolist()


folder = Path(tempfile.mkdtemp())
plain = save(folder / "plain.safetensors", random_model(n_layer=2), "target")
for mode in sys.argv[1:]:
    path = folder / f"{mode}.safetensors"
    if mode != "plain":
        quantize_checkpoint(plain, mode, 32, path)
    alone = torch.tensor(logits(path))
    for found in on_processes(2, folder / f"meeting-{mode}", lambda path=path: logits(path)):
        print(mode, float((torch.tensor(found) - alone).norm() / alone.norm()))
