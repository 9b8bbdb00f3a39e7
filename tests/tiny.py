"""Tiny models for the tests: the golden ones, converted, and random ones of chosen behaviour."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from convert_hf_checkpoint import convert
from eagle_draft import DraftConfig, DraftHead
from model import ModelConfig, Transformer
from talon.decoder import Decoder, Generation
from talon.sampling import GREEDY, SamplingConfig
from talon.trees import Tree

GOLDEN = Path(__file__).parent / "data" / "golden"
TREES = (
    "chain:1",
    "chain:5",
    "static",
    "dynamic:nodes=8,levels=3,top_k=4",
    "dynamic:nodes=60,levels=8,top_k=10",
)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sample": SamplingConfig(1.0, seed=4),
    "filter": SamplingConfig(0.8, top_k=20, top_p=0.9, seed=5),
}


@cache
def converted(directory: Path, out: Path) -> Path:
    """The converted file of a golden directory; made once per session."""
    out.parent.mkdir(parents=True, exist_ok=True)
    convert(directory, out)
    return out


def decode(
    decoder: Decoder, ids: list[int], n: int, sampling: SamplingConfig = GREEDY, **options
) -> Generation:
    """Run a whole generation and return it."""
    generation = Generation(decoder, ids, sampling, n, **options)
    for _ in generation:
        pass
    return generation


def unpack_int4(packed: torch.Tensor, groupsize: int) -> torch.Tensor:
    """uint8 [out, Ip] steps 0..15 of the packed uint8 [out, Ip/2] of a file."""
    halves = packed.view(packed.shape[0], -1, groupsize // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).view(packed.shape[0], -1)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer.json with 256 ids, one for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def random_model(seed: int = 0, **changes) -> Transformer:
    """A random LLaMA whose attention matters, with a wide lm_head: greedy choices have margins."""
    fields = {
        "vocab_size": 128, "dim": 64, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "head_dim": 16,
        "intermediate_size": 160, "norm_eps": 1e-6, "max_seq_length": 128,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**(fields | changes))).requires_grad_(False).eval()
    model.output.weight.normal_()
    for layer in model.layers:
        layer.attention_norm.weight.uniform_(0.5, 1.5)
        layer.ffn_norm.weight.uniform_(0.5, 1.5)
        if model.config.qk_norm:
            layer.attention.q_norm.weight.uniform_(0.5, 1.5)
            layer.attention.k_norm.weight.uniform_(0.5, 1.5)
    return model


def random_head(model: Transformer, family: str = "eagle1", seed: int = 1, **changes) -> DraftHead:
    """A random head for `model`: almost always wrong."""
    c = model.config
    fields = {
        "family": family, "dim": c.dim, "n_head": c.n_head, "n_kv_head": c.n_kv_head,
        "head_dim": c.head_dim, "intermediate_size": c.intermediate_size, "norm_eps": c.norm_eps,
        "vocab_size": c.vocab_size, "draft_vocab_size": c.vocab_size, "target_dim": c.dim,
        "max_seq_length": c.max_seq_length, "own_output": family == "eagle3",
        "feature_layers": (1, 2, 3) if family == "eagle3" else None,
    }  # fmt: skip
    torch.manual_seed(seed)
    head = DraftHead(DraftConfig(**(fields | changes))).requires_grad_(False).eval()
    head.tok_embeddings = model.tok_embeddings
    if not head.config.own_output:
        head.output = model.output
    return head


def table_model(log_probs: torch.Tensor, n_layer: int = 2, **changes) -> Transformer:
    """A LLaMA whose next token depends on the last one only: log_probs [V, V], row = last token.

    One-hot embeddings, attention and MLP that add nothing; the final norm makes the embedding
    sqrt(C) * one-hot, which lm_head maps to the row of the table.
    """
    size = log_probs.shape[0]
    dim = changes.pop("dim", size + size % 2)
    model = random_model(vocab_size=size, dim=dim, n_layer=n_layer, head_dim=16, **changes)
    model.tok_embeddings.weight.copy_(torch.eye(size, dim) * 8)
    for layer in model.layers:
        layer.attention.wo.weight.zero_()
        layer.feed_forward.w2.weight.zero_()
    model.output.weight.zero_()
    model.output.weight[:, :size].copy_(log_probs.T / dim**0.5)
    return model


def cycle_table(size: int, gap: float = 10.0) -> torch.Tensor:
    """Log-probabilities of the cycle 0 -> 1 -> 2 -> ... -> 0, every other token `gap` lower."""
    logits = torch.zeros(size, size)
    logits[torch.arange(size), (torch.arange(size) + 1) % size] = gap
    return logits.log_softmax(-1)


def table_head(model: Transformer, wrong_after: tuple[int, ...] = ()) -> DraftHead:
    """An EAGLE-1 head for a table model that is right except after the tokens in `wrong_after`."""
    head = random_head(model)
    size, dim = model.config.vocab_size, model.config.dim
    guess = torch.eye(dim)
    for token in wrong_after:  # pretend that another token had been read
        guess[:, token] = torch.eye(dim)[:, (token + size // 2) % size]
    # fc sees [8 * one-hot of the token, sqrt(C) * one-hot of the token before].
    head.fc.weight.zero_()
    head.fc.weight[:, :dim].copy_(guess * (dim**0.5 / 8))
    head.layer.attention.wo.weight.zero_()
    head.layer.feed_forward.w2.weight.zero_()
    return head


def eager(
    model: Transformer, head: DraftHead | None = None, tree: Tree | None = None, context: int = 100
) -> Decoder:
    options = {"tree": tree} if tree else {}
    return Decoder(model, context, head, compile=False, **options)
