"""Sampling: exact distributions, filters, ties, and noise that is a function of (seed, position,
token).
"""

import math

import pytest
import torch
from safetensors.torch import load_file
from tiny import GOLDEN, converted

from talon.checking import full_logits
from talon.sampling import Pick, Picks, SamplingConfig, gumbel
from talon.text import load

DRAWS = 20_000


def pick_of(**fields) -> Pick:
    return Picks(torch.device("cpu")).set(SamplingConfig(**fields))


def draw(logits: torch.Tensor, draws: int = DRAWS, **fields) -> torch.Tensor:
    """`draws` seeded choices at different positions: int64 [draws]."""
    return pick_of(**fields).choose(logits.expand(draws, -1), torch.arange(draws))


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square goodness of fit, cells of fewer than 5 expected merged (Wilson-Hilferty's normal
    approximation).
    """
    expected = probs.double() * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts[order].double()
    keep = int((expected >= 5).sum())
    rest = expected[keep:].sum()
    if rest > 0:
        expected = torch.cat((expected[:keep], rest[None]))
        counts = torch.cat((counts[:keep], counts[keep:].sum()[None]))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


TABLE = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 1])
def test_chi_square_against_a_known_table(temperature, seed):
    tokens = draw(TABLE.log(), temperature=temperature, seed=seed)
    wanted = (TABLE.log() / temperature).softmax(0)
    assert p_value(tokens.bincount(minlength=5), wanted) > 1e-4


def test_chi_square_rejects_a_biased_sampler():
    """The negative control: a temperature that is 15 % off must be noticed."""
    tokens = draw(TABLE.log(), temperature=0.85)
    assert p_value(tokens.bincount(minlength=5), TABLE) < 1e-6


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.8), (3, 0.8), (2, 0.9)])
def test_chi_square_with_filters(top_k, top_p):
    tokens = draw(TABLE.log(), temperature=1.0, top_k=top_k, top_p=top_p)
    kept = TABLE.clone()
    if top_k:
        kept[top_k:] = 0
    kept /= kept.sum()
    before = kept.cumsum(0) - kept
    kept[before >= top_p] = 0
    counts = tokens.bincount(minlength=5)
    assert (counts[kept == 0] == 0).all()
    assert p_value(counts[kept > 0], (kept / kept.sum())[kept > 0]) > 1e-4


@pytest.mark.parametrize("prompt", ["p12", "p20", "p33"])
def test_chi_square_of_two_tokens_against_the_reference_distribution(prompt, tmp_path_factory):
    base = tmp_path_factory.getbasetemp() / "golden" / "eagle2_tiny_seed0"
    engine = load(
        converted(GOLDEN / "eagle2_tiny_seed0" / "target", base / "target.safetensors"),
        compile=False,
    )
    golden = load_file(GOLDEN / "rejection_sampling" / "golden.safetensors")
    ids = golden[f"{prompt}.prompt_ids"].tolist()
    logits = full_logits(engine.decoder.model, ids)[-1]
    torch.testing.assert_close(
        logits.softmax(0), golden[f"{prompt}.p_next"].float(), atol=1e-5, rtol=1e-3
    )
    first = draw(logits, 10_000, temperature=1.0, seed=1)
    assert p_value(first.bincount(minlength=256), golden[f"{prompt}.p_next"]) > 1e-4
    for index, token in enumerate(golden[f"{prompt}.top8_ids"].tolist()[:3]):
        logits = full_logits(engine.decoder.model, [*ids, token])[-1]
        second = draw(logits, 10_000, temperature=1.0, seed=2)
        wanted = golden[f"{prompt}.p_second_given_first"][index]
        assert p_value(second.bincount(minlength=256), wanted) > 1e-4


def test_consecutive_positions_are_independent():
    tokens = draw(TABLE.log(), temperature=1.0, draws=40_000)
    pairs = (tokens[:-1] * 5 + tokens[1:])[::2]
    assert p_value(pairs.bincount(minlength=25), torch.outer(TABLE, TABLE).flatten()) > 1e-4


def test_consecutive_seeds_are_independent():
    columns = torch.stack(
        [draw(TABLE.log(), 4000, temperature=1.0, seed=seed) for seed in range(4)]
    )
    pairs = columns[:-1].flatten() * 5 + columns[1:].flatten()
    assert p_value(pairs.bincount(minlength=25), torch.outer(TABLE, TABLE).flatten()) > 1e-4


def test_noise_has_the_moments_of_a_standard_gumbel():
    noise = gumbel(torch.tensor([3]), torch.arange(64), torch.arange(32_768)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772157) < 0.005
    assert abs(noise.var() - math.pi**2 / 6) < 0.01


def test_noise_depends_on_seed_position_and_token_alone():
    tokens = torch.tensor([5, 9, 40_000])
    whole = gumbel(torch.tensor([11]), torch.arange(100), torch.arange(50_000))
    assert torch.equal(gumbel(torch.tensor([11]), torch.tensor([42]), tokens), whole[42:43, tokens])
    assert not torch.equal(
        gumbel(torch.tensor([12]), torch.tensor([42]), tokens), whole[42:43, tokens]
    )


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]])
    assert pick_of(temperature=0).choose(logits, torch.tensor([0])).tolist() == [1]


def test_exactly_k_are_kept_when_logits_tie():
    tokens = draw(torch.zeros(8), temperature=1.0, top_k=3)
    assert tokens.unique().tolist() == [0, 1, 2]


def test_top_p_keeps_at_least_one():
    assert draw(TABLE.log(), 100, temperature=1.0, top_p=1e-6).unique().tolist() == [0]


@pytest.mark.parametrize("top_k", [5, 6, 200])
def test_top_k_at_or_above_the_vocabulary_is_no_filter(top_k):
    plain = draw(TABLE.log(), 2000, temperature=1.0)
    assert torch.equal(draw(TABLE.log(), 2000, temperature=1.0, top_k=top_k), plain)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingConfig(temperature, top_k=3, top_p=0.5).greedy


def test_a_low_temperature_is_nearly_greedy_without_overflow():
    assert draw(TABLE.log(), 200, temperature=1e-4).unique().tolist() == [0]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
        {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"seed": -1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_with_what_is_allowed(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} .* is not allowed: give"):
        SamplingConfig(**fields)


def test_the_heads_guess_meets_the_targets_noise():
    """A head with the target's own logits guesses the target's choice first, whatever the seed."""
    logits, positions = torch.randn(50, 300), torch.arange(50)
    for fields in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}):
        pick = pick_of(seed=5, **fields)
        scores, tokens = pick.guess(logits, positions, torch.arange(300), top_k=4)
        assert torch.equal(tokens[:, 0], pick.choose(logits, positions))
        assert (scores <= 0).all() and (scores.diff(dim=1) <= 0).all()


def test_a_reduced_vocabulary_meets_the_same_noise():
    logits, ids = torch.randn(1, 40), torch.arange(0, 80, 2)
    pick, position = pick_of(temperature=1.0, seed=2), torch.tensor([9])
    values, _ = pick.values(logits, position, ids, 40)
    torch.testing.assert_close(values - logits, gumbel(pick.seed, position, ids))


def test_guesses_survive_a_head_that_yields_nan():
    logits = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0]])
    pick = pick_of(temperature=0)
    scores, tokens = pick.guess(logits, torch.tensor([0]), torch.arange(4), top_k=4)
    assert tokens[0, :2].tolist() == [3, 1] and sorted(tokens[0].tolist()) == [0, 1, 2, 3]
    assert not scores.isnan().any()
