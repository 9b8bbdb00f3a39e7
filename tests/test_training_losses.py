"""The trainer learns what decoding asks of the head: the same numbers, the right masks."""

from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_training import HEADS, VOCAB, random_data, tiny_target, training_config

from eagle_draft import DraftHead
from model import Attention, KVCache, Place, Transformer, causal_mask, rope_table
from talon.training.conversations import Conversation
from talon.training.head import borrow, build_head, head_config
from talon.training.losses import Batch, Teacher, Unrolled, ahead
from talon.training.run import TrainingRun


def unrolled_of(model: Transformer, family: str) -> Unrolled:
    config = training_config(family)
    sizes = head_config(model.config, config)
    ids = torch.arange(sizes.draft_vocab_size) + 3
    head = build_head(sizes, model, ids, config.seed)
    with torch.no_grad():
        for parameter in head.layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return Unrolled(head, borrow(head, model), config)


def batch_of(model: Transformer, family: str, data: list[Conversation]) -> Batch:
    return Teacher(model, head_config(model.config, training_config(family)), 64).batch(data)


def test_a_guess_is_counted_where_its_own_label_is_an_answer_token() -> None:
    # Two conversations of five tokens; answers at 2..4 and at 3..4. By hand: entry i at level s
    # reads token i+1+s, guesses token i+2+s, and counts if that one is an answer token.
    answer = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    ids = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    batch = Batch(ids, answer, [], torch.empty(0), torch.empty(0))
    assert batch.counted(0).int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
    assert batch.counted(1).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.counted(2).int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert ahead(ids, 1).tolist() == [[11, 12, 13, 14, 0], [21, 22, 23, 24, 0]]
    assert ahead(ids, 2)[batch.counted(0)].tolist() == [12, 13, 14, 23, 24]
    assert ahead(ids, 2)[0, 0] == 12
    assert ahead(ids, 3)[batch.counted(1)].tolist() == [13, 14, 23, 24]


@HEADS
def test_a_padded_batch_has_the_losses_of_its_rows_alone(family: str) -> None:
    model, data = tiny_target(), random_data(3)
    unrolled = unrolled_of(model, family)
    _, together = unrolled(batch_of(model, family, data), 3)
    alone = [unrolled(batch_of(model, family, [row]), 3)[1] for row in data]
    assert torch.equal(together[:, :2], sum(table[:, :2] for table in alone))
    # Cross-entropies are means over the entries inside the draft vocabulary.
    if family == "eagle1":
        torch.testing.assert_close(together[:, 3], sum(table[:, 3] for table in alone))


@HEADS
def test_unrolled_levels_give_the_logits_that_decoding_gives(family: str) -> None:
    """Three levels down the true text from every position: the trainer's numbers against the head's
    own cache."""
    model, (row,) = tiny_target(), random_data(1, longest=20)
    unrolled = unrolled_of(model, family)
    batch = batch_of(model, family, [row])
    with torch.no_grad():
        trained = [unrolled.head.logits(hidden) for hidden in unrolled.levels(batch, 3)]
    head, c = unrolled.head, unrolled.head.config
    head.layer.attention = plain_attention(head)
    kv = KVCache(1, c.n_kv_head, 32, c.head_dim, torch.float32)
    table = rope_table(32, c.head_dim, c.rope_theta, c.rope_scaling)
    ids, slots, start = torch.tensor(row.ids), torch.arange(32), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        fused = head.fuse([x[0] for x in batch.features])
        for entry in range(15):
            rows = torch.arange(entry + 1)
            place = Place(table[:, rows], rows, causal_mask(start, entry + 1, slots))
            hidden = head(ids[1 : entry + 2], fused[: entry + 1], place, kv.layer(0))[-1:]
            torch.testing.assert_close(
                head.logits(hidden)[0], trained[0][entry], atol=1e-4, rtol=1e-4
            )
            for level in (1, 2):
                at = torch.tensor([entry + level])
                place = Place(table[:, at], at, slots[None] <= at[:, None])
                hidden = head(ids[at + 1], hidden, place, kv.layer(0))
                torch.testing.assert_close(
                    head.logits(hidden)[0], trained[level][entry], atol=1e-4, rtol=1e-4
                )


def plain_attention(head: DraftHead) -> Attention:
    c, old = head.config, head.layer.attention
    new = Attention(c, old.wqkv.in_features)
    new.load_state_dict(old.state_dict())
    return new


@HEADS
def test_the_teacher_reads_what_decoding_reads(family: str) -> None:
    model, (row,) = tiny_target(), random_data(1)
    batch = batch_of(model, family, [row])
    x, streams = model.tok_embeddings(torch.tensor(row.ids)), []
    kv = KVCache(7, 2, 64, 8, torch.float32)
    n = len(row.ids)
    table = rope_table(64, 8, 10000.0, None)[:, :n]
    mask = causal_mask(torch.zeros(1, dtype=torch.int64), n, torch.arange(n))
    for i, layer in enumerate(model.layers):
        streams.append(x)
        x = layer(x, Place(table, torch.arange(n), mask), kv.layer(i))
    final = model.norm(x)
    wanted = [final] if family == "eagle1" else [streams[2], streams[3], streams[4]]
    for mine, right in zip(batch.features, wanted, strict=True):
        torch.testing.assert_close(mine[0], right)
    assert torch.equal(batch.choice[0], F.linear(final, model.output.weight).argmax(-1))


@HEADS
def test_one_batch_can_be_learnt_by_heart(family: str, tmp_path: Path) -> None:
    model, data = tiny_target(), random_data(4, longest=30)
    config = training_config(
        family, epochs=250, batch_tokens=1000, draft_vocab_size=VOCAB, unroll=1, lr=3e-2
    )
    head = build_head(head_config(model.config, config), model, torch.arange(VOCAB), config.seed)
    run = TrainingRun(model, head, data, config, tmp_path)
    best = max(run.train_step()["accuracy"][0] for _ in range(run.total))
    assert best >= 0.99


@HEADS
def test_every_level_is_taught_by_the_distribution_that_decoding_would_choose_from(
    family: str,
) -> None:
    """The target's distributions are computed once; each level reads the rows that are its own."""
    model, data = tiny_target(), random_data(3)
    unrolled, batch = unrolled_of(model, family), batch_of(model, family, data)
    teacher, rows = unrolled.teach(batch)
    for level in range(3):
        at = batch.counted(level)
        chosen_from = F.linear(ahead(batch.final, level + 1)[at], unrolled.target_output)
        mine = teacher[ahead(rows, level + 1)[at]]
        torch.testing.assert_close(mine, chosen_from.softmax(-1))
