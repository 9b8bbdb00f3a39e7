"""A head before and after its training: a fresh one from its target, its file, and back from that.

Leaves out: the losses (losses.py), the run (run.py), loading a head to draft with it
(talon/loading.py).
"""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle_draft import DraftConfig, DraftHead, default_feature_layers
from model import ModelConfig, Transformer
from talon.checkpoint import TensorSpec
from talon.drafters.medusa import MedusaConfig, MedusaHeads
from talon.kernels.linear import unpacked
from talon.loading import fit_head, read_file, rows_of
from talon.training.conversations import Conversation
from talon.training.losses import TrainingConfig, UnrolledAttention
from talon.writing import write_checkpoint

# Weight of a token's rank against its count when the draft vocabulary is chosen.
RANK_PRIOR = 30000


def draft_vocabulary(data: list[Conversation], vocab_size: int, size: int) -> Tensor:
    """The `size` ids the head may guess, ascending int64: frequent in the answers, or low in the
    tokenizer's own order, which for BPE is one of frequency too."""
    counts: Counter[int] = Counter()
    for row in data:
        for start, end in row.spans:
            counts.update(row.ids[start:end])
    weight = [counts[i] + RANK_PRIOR / (i + 300) for i in range(vocab_size)]
    return torch.tensor(sorted(sorted(range(vocab_size), key=lambda i: -weight[i])[:size]))


def head_config(target: ModelConfig, config: TrainingConfig) -> DraftConfig:
    """A head of the target's own sizes; layers and RoPE as decoding finds them."""
    t, eagle3 = target, config.head == "eagle3"
    size = config.draft_vocab_size
    if size is None:
        size = t.vocab_size if t.vocab_size <= 32768 else 32000
    if not 1 <= size <= t.vocab_size:
        raise ValueError(f"draft_vocab_size {size} is not allowed: give 1 to {t.vocab_size}")
    if config.head == "medusa":
        sizes = {"vocab_size": t.vocab_size, "draft_vocab_size": size, "own_output": False}
        return MedusaConfig("medusa", t.dim, config.unroll, 1, source_format="talon", **sizes)
    return DraftConfig(
        family=config.head, dim=t.dim, n_head=t.n_head, n_kv_head=t.n_kv_head,
        head_dim=t.head_dim, intermediate_size=t.intermediate_size, norm_eps=t.norm_eps,
        vocab_size=t.vocab_size, draft_vocab_size=size, target_dim=t.dim,
        max_seq_length=t.max_seq_length, rope_theta=t.rope_theta, rope_scaling=t.rope_scaling,
        rope_source="the target's, by training",
        feature_layers=default_feature_layers(t.n_layer) if eagle3 else None, own_output=eagle3,
    )  # fmt: skip


def build_head(config: DraftConfig, model: Transformer, ids: Tensor, seed: int) -> DraftHead:
    """A fresh head in fp32 that repeats the newest feature: at first its layer adds little. Medusa
    heads begin as the target's lm_head alone (arXiv 2401.10774, section 2.2.1)."""
    generator = torch.Generator().manual_seed(seed)
    c, device = config, model.norm.weight.device
    if c.family == "medusa":
        head = MedusaHeads(c)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        head.d2t.copy_(ids - torch.arange(len(ids)))
        return head.to(device)
    head = DraftHead(config)
    head.layer.attention = UnrolledAttention(c, head.layer.attention.wqkv.in_features)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
        head.fc.weight[:, -c.dim :] += torch.eye(c.dim)
        if c.family == "eagle3":
            head.norm.weight.copy_(model.norm.weight)
            head.output.weight.copy_(output_rows(model, ids).weight)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    return head.to(device)


def output_rows(model: Transformer, ids: Tensor) -> nn.Linear:
    """The target's lm_head for a draft vocabulary, as a plain layer that gradients pass."""
    reduced = rows_of(model.output, ids.to(model.norm.weight.device))
    return reduced if isinstance(reduced, nn.Linear) else unpacked(reduced)


def borrow(head: DraftHead, model: Transformer) -> Tensor:
    """Give the head what it shares with the target, frozen; returns the reduced lm_head [Vd, C]."""
    shared = output_rows(model, head.target_ids)
    if not head.config.own_embedding:
        head.tok_embeddings = model.tok_embeddings.requires_grad_(False)
    if not head.config.own_output:
        head.output = shared.requires_grad_(False)
    return shared.weight.detach()


def write_head(path: Path, head: DraftHead, source: dict) -> None:
    """The head as generate.py loads it: its own tensors in fp32, the scale folded into fc."""
    c = head.config
    borrowed = {
        "tok_embeddings.weight": not c.own_embedding,
        "output.weight": not c.own_output,
        "d2t": c.draft_vocab_size == c.vocab_size,
    }
    folded = {"fc.weight": head.fc.weight} if hasattr(head, "fc") else {}
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in (head.state_dict() | folded).items()
        if "parametrizations" not in name and not borrowed.get(name)
    }
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_checkpoint(
        path, kind="draft", config=asdict(c), specs=specs, tensors=state.items(), source=source
    )


def read_head(
    path: Path, model: Transformer, config: TrainingConfig, ids: Tensor | None
) -> DraftHead:
    """A head to go on from; one that borrows its output may get another draft vocabulary, `ids`."""
    file, c = read_file(path, "draft")
    c = fit_head(path, c, model.config)
    if c.family != config.head:
        raise ValueError(f"{path} is an {c.family} head, not {config.head}: give --head {c.family}")
    if file.quantization:
        raise ValueError(f"{path} is quantised: give the head that it was made from")
    if c.family == "medusa" and (c.own_output or c.heads != config.unroll):
        own = ", with lm_heads of their own" if c.own_output else ""
        raise ValueError(
            f"{path} holds {c.heads} Medusa heads{own}, and --init takes --unroll {config.unroll} "
            "that borrow the target's: give heads that this command trained"
        )
    if ids is None or c.own_output:
        ids = torch.arange(c.draft_vocab_size)
        ids = ids + (file.tensor("d2t") if "d2t" in file.specs else 0)
    head = build_head(replace(c, draft_vocab_size=len(ids)), model, ids, config.seed)
    loaded = {name: value.float() for name, value in file.tensors() if name != "d2t"}
    missing, unexpected = head.load_state_dict(loaded, strict=False)
    wrong = [name for name in (*missing, *unexpected) if name != "d2t"]
    if wrong:
        raise ValueError(f"{path} does not fit its own config ({wrong[:3]}): convert it again")
    return head
