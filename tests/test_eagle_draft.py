"""Trees and the head's own arithmetic: shapes, masks, selection, variants, and what is refused."""

import time

import pytest
import torch
from tiny import random_head, random_model

from eagle_draft import ancestor_mask, default_feature_layers, node_parents, select
from model import KVCache, Place, causal_mask, rope_table
from talon.trees import EAGLE1_PATHS, NO_TREE, chain, dynamic_tree, parse_tree, static_tree


def slow_select(scores, parents, count):
    """The selection by plain loops: kept candidates, node parents, ancestor sets."""
    kept = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])
    place = {flat: node for node, flat in enumerate(kept, start=1)}
    parent = [0] + [place[parents[flat]] if parents[flat] >= 0 else 0 for flat in kept]
    ancestors = []
    for node in range(count + 1):
        seen = {node}
        while node:
            node = parent[node]
            seen.add(node)
        ancestors.append(seen)
    return kept, parent, ancestors


def random_candidates(levels: int, top_k: int, ties: bool):
    """Scores and flat parents as growing makes them: no child scores higher than its parent."""
    gains = torch.rand(levels, top_k * top_k).neg()
    if ties:
        gains = (gains * 2).round()  # many exact ties, many children equal to their parent
    scores, parents, beam = [*gains[0, :top_k].tolist()], [-1] * top_k, list(range(top_k))
    for level in range(1, levels):
        start = len(scores)
        for row, parent in enumerate(beam):
            best_first = gains[level, row * top_k : (row + 1) * top_k].sort(descending=True).values
            scores += (scores[parent] + best_first).tolist()
            parents += [parent] * top_k
        beam = sorted(range(start, len(scores)), key=lambda i: (-scores[i], i))[:top_k]
    return torch.tensor(scores), torch.tensor(parents)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "levels, top_k, count", [(1, 4, 3), (2, 3, 5), (4, 5, 20), (8, 10, 59), (3, 1, 2)]
)
def test_selection_equals_plain_loops_and_keeps_every_parent(levels, top_k, count, ties):
    for seed in range(5):
        torch.manual_seed(seed)
        scores, parents = random_candidates(levels, top_k, ties)
        count = min(count, len(scores))
        tokens = torch.arange(len(scores))
        kept, parent, ancestors = slow_select(scores.tolist(), parents.tolist(), count)
        mine, node_parent, mask = select(tokens, scores, parents, count, levels)
        assert mine.tolist() == kept
        assert node_parent.tolist() == parent
        assert [set(row.nonzero().flatten().tolist()) for row in mask] == ancestors


def test_selection_of_60_nodes_takes_at_most_2_ms():
    scores, parents = random_candidates(8, 10, False)
    tokens, times = torch.arange(len(scores)), []
    for _ in range(50):
        started = time.perf_counter()
        select(tokens, scores, parents, 59, 8)
        times.append(time.perf_counter() - started)
    assert sorted(times)[10] < 2e-3


def test_the_eagle1_tree_has_26_nodes_in_the_published_order():
    tree = parse_tree("static")
    assert (tree.nodes, tree.levels, tree.top_k, tree.beam) == (26, 5, 4, 4)
    assert [tree.block(level) for level in range(1, 6)] == [0, 4, 20, 36, 52]


def test_a_chain_is_a_static_tree():
    tree = chain(3)
    assert (tree.nodes, tree.levels, tree.top_k, tree.beam) == (4, 3, 1, 1)
    assert tree.keep == (0, 1, 2) and tree.expand == ((0,), (1,))


def test_static_parents_and_depths_follow_the_paths():
    tree = static_tree(EAGLE1_PATHS, "x")
    parents = []
    for level in range(2, tree.levels + 1):
        parents += [flat for flat in tree.expand[level - 2] for _ in range(tree.top_k)]
    flat_parents = torch.tensor([-1] * tree.top_k + parents)
    parent = node_parents(torch.tensor(tree.keep), flat_parents)
    mask = ancestor_mask(parent, tree.levels)
    assert (mask.sum(1) - 1).tolist() == [0] + [len(path) for path in EAGLE1_PATHS]
    paths = [[]] + EAGLE1_PATHS
    assert [paths[i] for i in parent.tolist()[1:]] == [path[:-1] for path in EAGLE1_PATHS]


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:0", "chain:x", "chain:65", "dynamic:nodes=0", "dynamic:nodes=-3",
     "dynamic:depth=3", "dynamic:nodes=60,levels=1,top_k=4", "tree", "static:5", "missing.json",
     "dynamic:top_k=0", "dynamic:levels=0"],
)  # fmt: skip
def test_unknown_and_impossible_trees_are_refused(text):
    with pytest.raises(ValueError, match="tree"):
        parse_tree(text)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[[0], [1, 0]]",
        "[]",
        "[[]]",
        "[[-1]]",
        '[["a"]]',
        "not json",
        "[[0], [0, 0.5]]",
        "[[true]]",
    ],
)
def test_tree_files_that_are_no_tree_are_refused(tmp_path, content):
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="tree"):
        parse_tree(str(file))


def test_tree_files_give_static_trees(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [2], [2, 1], [0, 0]]")
    tree = parse_tree(str(file))
    assert (tree.nodes, tree.levels, tree.top_k, tree.beam) == (5, 2, 3, 2)


def test_one_node_is_no_tree():
    assert dynamic_tree(nodes=1) is NO_TREE


@pytest.mark.parametrize(
    "layers, wanted", [(7, None), (8, (2, 4, 5)), (32, (2, 16, 29)), (40, (2, 20, 37))]
)
def test_default_feature_layers_are_the_published_ones_or_refused(layers, wanted):
    if wanted is None:
        wanted = (2, 3, 4)
    assert default_feature_layers(layers) == wanted


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_targets_too_shallow_for_default_features_are_refused(layers):
    with pytest.raises(ValueError, match=f"{layers} layers"):
        default_feature_layers(layers)


def run_head(head, tokens, hidden):
    rows, c = tokens.shape[0], head.config
    index = torch.arange(rows)
    kv = KVCache(1, c.n_kv_head, rows, c.head_dim, torch.float32).layer(0)
    table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling)
    place = Place(table, index, causal_mask(index[:1], rows, index))
    return head(tokens, hidden, place, kv)


def rms(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fuse", ["plain", "norm_before_fc", "fc_norm"])
def test_eagle3_variants_compute_what_their_names_say(norm_before_residual, norm_output, fuse):
    """With attention and MLP switched off a head is its norms and residuals, which can be written
    down by hand.
    """
    options = {fuse: True} if fuse != "plain" else {}
    head = random_head(
        random_model(),
        "eagle3",
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        **options,
    )
    for module in head.modules():
        if type(module).__name__ == "RMSNorm":
            module.weight.uniform_(0.5, 2.0)
    head.layer.attention.wo.weight.zero_()
    head.layer.feed_forward.w2.weight.zero_()
    features, tokens = [torch.randn(3, 64) for _ in range(3)], torch.tensor([1, 2, 3])
    x = torch.cat(features, -1)
    if fuse == "norm_before_fc":
        x = rms(x, head.input_norm.weight)
    if fuse == "fc_norm":
        x = torch.cat(
            [rms(f, norm.weight) for f, norm in zip(features, head.fc_norm, strict=True)], -1
        )
    fused = x @ head.fc.weight.T
    torch.testing.assert_close(head.fuse(features), fused)
    wanted = rms(fused, head.layer.hidden_norm.weight) if norm_before_residual else fused
    logits = rms(wanted, head.norm.weight) @ head.output.weight.T
    if norm_output:
        wanted = rms(wanted, head.norm.weight)
    out = run_head(head, tokens, head.fuse(features))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(head.logits(out), logits)


def test_eagle1_adds_no_norm_before_attention_and_uses_the_targets_lm_head():
    head = random_head(random_model(), fc_bias=True)
    head.layer.attention.wo.weight.zero_()
    head.layer.feed_forward.w2.weight.zero_()
    tokens, hidden = torch.tensor([4, 5]), torch.randn(2, 64)
    wanted = torch.cat((head.tok_embeddings(tokens), hidden), -1) @ head.fc.weight.T + head.fc.bias
    out = run_head(head, tokens, hidden)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(head.logits(out), out @ head.output.weight.T)
