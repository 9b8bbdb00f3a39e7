"""A draft head's beginning and end: from a target to a fresh head, and from a trained head to its
file and back.

Leaves out: the losses (draft_unroll.py), the run (train_draft.py), loading a head to draft with it
(loading.py).
"""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle_draft import DraftConfig, DraftHead, default_feature_layers
from model import ModelConfig, Transformer
from talon.checkpoint import TensorSpec, write_checkpoint
from talon.kernels.linear import unpacked
from talon.loading import fit_head, read_file, rows_of
from talon.training.conversations import Conversation
from talon.training.losses import Settings, UnrolledAttention

RANK_PRIOR = 30000  # weight of a token's rank against its count when the draft vocabulary is chosen


def draft_vocabulary(data: list[Conversation], vocab_size: int, size: int) -> Tensor:
    """The `size` ids the head may guess, ascending int64: frequent in the answers, or low in the
    tokenizer's own order, which for BPE is an order of frequency and fills up what little data
    leaves open."""
    counts: Counter[int] = Counter()
    for row in data:
        for start, end in row.spans:
            counts.update(row.ids[start:end])
    weight = [counts[i] + RANK_PRIOR / (i + 300) for i in range(vocab_size)]
    return torch.tensor(sorted(sorted(range(vocab_size), key=lambda i: -weight[i])[:size]))


def head_config(target: ModelConfig, settings: Settings) -> DraftConfig:
    """A head of the target's own sizes; layers and RoPE as decoding finds them."""
    t, eagle3 = target, settings.head == "eagle3"
    size = settings.draft_vocab_size
    if size is None:
        size = t.vocab_size if t.vocab_size <= 32768 else 32000
    if not 1 <= size <= t.vocab_size:
        raise ValueError(
            f"draft_vocab_size {size} is not allowed: give 1 to {t.vocab_size}, "
            "the target's vocabulary"
        )
    return DraftConfig(
        family=settings.head, dim=t.dim, n_head=t.n_head, n_kv_head=t.n_kv_head,
        head_dim=t.head_dim, intermediate_size=t.intermediate_size, norm_eps=t.norm_eps,
        vocab_size=t.vocab_size, draft_vocab_size=size, target_dim=t.dim,
        max_seq_length=t.max_seq_length, rope_theta=t.rope_theta, rope_scaling=t.rope_scaling,
        rope_source="the target's, by training",
        feature_layers=default_feature_layers(t.n_layer) if eagle3 else None, own_output=eagle3,
    )  # fmt: skip


def build_head(
    config: DraftConfig, model: Transformer, ids: Tensor, settings: Settings
) -> DraftHead:
    """A fresh head in fp32 that at first repeats the newest feature: fc passes it on, the layer
    adds little."""
    generator = torch.Generator().manual_seed(settings.seed)
    head = DraftHead(config)
    c, device = config, model.norm.weight.device
    head.layer.attention = UnrolledAttention(config, head.layer.attention.wqkv.in_features)
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
    rows = rows_of(model.output, ids.to(model.norm.weight.device))
    return rows if isinstance(rows, nn.Linear) else unpacked(rows)


def borrow(head: DraftHead, model: Transformer) -> Tensor:
    """Give the head what it shares with the target, frozen; returns the target's output rows [Vd,
    C]."""
    shared = output_rows(model, head.target_ids)
    if not head.config.own_embedding:
        head.tok_embeddings = model.tok_embeddings.requires_grad_(False)
    if not head.config.own_output:
        head.output = shared.requires_grad_(False)
    return shared.weight.detach()


def own_state(head: DraftHead) -> dict[str, Tensor]:
    """The head's own tensors, the scale folded into fc, without what it borrows."""
    state = {n: value for n, value in head.state_dict().items() if "parametrizations" not in n}
    state["fc.weight"] = head.fc.weight
    if not head.config.own_embedding:
        del state["tok_embeddings.weight"]
    if not head.config.own_output:
        del state["output.weight"]
    if head.config.draft_vocab_size == head.config.vocab_size:
        del state["d2t"]
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def write_head(
    path: Path, head: DraftHead, source: dict, dtype: torch.dtype = torch.float32
) -> None:
    """The head as generate.py loads it."""
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in own_state(head).items()}
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_checkpoint(
        path,
        kind="draft",
        config=asdict(head.config),
        specs=specs,
        tensors=state.items(),
        source=source,
    )


def read_head(path: Path, model: Transformer, settings: Settings, ids: Tensor | None) -> DraftHead:
    """A head to go on from. Its draft vocabulary stays, unless it borrows its output and another
    one is asked for."""
    file, config = read_file(path, "draft")
    config = fit_head(path, config, model.config)
    if config.family != settings.head:
        raise ValueError(
            f"{path} is an {config.family} head, not {settings.head}: give --head {config.family}"
        )
    if file.quantization:
        raise ValueError(
            f"{path} is quantised and cannot be trained: give the head it was made from"
        )
    kept = (
        file.tensor("d2t")
        if "d2t" in file.specs
        else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    )
    kept = kept + torch.arange(config.draft_vocab_size)
    if ids is None or config.own_output:
        ids = kept
    head = build_head(replace(config, draft_vocab_size=len(ids)), model, ids, settings)
    loaded = {name: value.float() for name, value in file.tensors() if name != "d2t"}
    missing, unexpected = head.load_state_dict(loaded, strict=False)
    missing = [name for name in missing if name != "d2t"]
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit its own config ({[*missing, *unexpected][:3]}): convert it again"
        )
    return head
