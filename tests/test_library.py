"""What programs get from `load`: pieces, ends, prompts, refusals."""

import pytest
import torch
from tiny import table_head, table_model
from world import LIMIT, TREES, VOCAB, cycle_of, say, speaker

from talon.conversation import Conversation
from talon.decoder import Decoder
from talon.loading import fit_tree
from talon.text import Engine, load
from talon.trees import NO_TREE, parse_tree


def test_pieces_joined_are_the_text_and_the_decoded_ids(plain, tokenizer):
    for prompt in ("Hello", [{"role": "user", "content": "Hi"}], [5, 6, 7]):
        text = plain.generate(prompt, max_new_tokens=60, ignore_eos=True)
        pieces = list(text)
        assert len(pieces) > 5
        assert "".join(pieces) == text.text == tokenizer.decode(text.tokens)


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("text", ["😀é日", "e\u0301x", "a\udcffb\udce2\udc82c", "\udc98\udca5"])
def test_characters_split_over_tokens_are_streamed_whole(tokenizer, tree, text):
    data = text.encode(errors="surrogateescape")
    engine = speaker(tokenizer, data, tree)
    for count in range(0, 3 * len(data)):
        generation = engine.generate([4], max_new_tokens=count)
        assert len(generation.tokens) == 0
        pieces = list(generation)
        assert generation.tokens == (say(data) * 4)[:count]
        assert "".join(pieces) == generation.text == tokenizer.decode(generation.tokens)
        assert generation.text == (data * 4)[:count].decode(errors="replace")


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (("d",), "abc"),
        (("cd",), "ab"),
        (("fgh",), "abcde"),
        (("a",), ""),
        (("ab",), ""),
        (("ga",), None),  # never said: h follows g
        (("mz",), None),
        (("kl", "de"), "abc"),
        (("de", "def", "cde"), "ab"),
        (("jkx", "jkl"), "abcdefghi"),
        (("ma",), "abcdefghijkl"),  # over the seam of the cycle
    ],
)
def test_a_stop_text_is_cut_off_with_all_that_follows(tokenizer, tree, stops, kept):
    engine = speaker(tokenizer, b"abcdefghijklm", tree)
    generation = engine.generate([4], max_new_tokens=20, stop=stops)
    pieces = list(generation)
    whole = "abcdefghijklm" * 2
    assert "".join(pieces) == generation.text == (whole[:20] if kept is None else kept)
    assert generation.generation.stop_reason == ("length" if kept is None else "stop")
    if kept is not None:  # the ids end with the token that completes the stop text
        end = min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
        assert generation.tokens == (say(b"abcdefghijklm") * 2)[:end]


def test_a_stop_text_that_ends_with_the_budget_is_a_stop(tokenizer):
    engine = speaker(tokenizer, b"abcdef", "chain:5")
    generation = engine.generate([4], max_new_tokens=4, stop=("cd",))
    assert "".join(generation) == "ab" and generation.generation.stop_reason == "stop"


def test_a_beginning_of_a_stop_text_is_shown_when_the_text_ends_there(tokenizer):
    engine = speaker(tokenizer, b"abcdef", "chain:5")
    generation = engine.generate([4], max_new_tokens=4, stop=("cdx", "dx"))
    assert "".join(generation) == "abcd" and generation.generation.stop_reason == "length"


@pytest.mark.parametrize("tree", [None, *TREES])
def test_a_special_token_is_a_stop_text_too(tokenizer, tree):
    """It is never seen in the text, so it is known by its id, also inside an accepted run."""
    table = cycle_of([*say(b"a", b"b"), tokenizer.token_id("<|start|>"), *say(b"c")])
    model = table_model(table, max_seq_length=LIMIT)
    head = table_head(model) if tree else None
    shape = fit_tree(parse_tree(tree), head.config) if tree else NO_TREE
    engine = Engine(Decoder(model, LIMIT, head, shape, compile=False), tokenizer, (), {})
    text = engine.generate(say(b"c"), max_new_tokens=30, stop=("<|start|>", "zz"))
    assert "".join(text) == text.text == "ab"
    assert text.generation.stop_reason == "stop" and len(text.tokens) == 3
    with pytest.raises(ValueError, match="special token next to other text"):
        engine.generate(say(b"c"), stop="<|start|>user")


def test_one_stop_text_may_be_given_as_a_string(tokenizer):
    engine = speaker(tokenizer, b"abcdef")
    assert "".join(engine.generate([4], max_new_tokens=9, stop="cd")) == "ab"


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("at", range(8))
def test_every_declared_end_token_ends_an_accepted_run_where_it_stands(tokenizer, tree, at):
    """C01, C09: anywhere inside a run; the first of several wins; the next prompt is clean."""
    cycle = say(b"abcdefgh")
    engine = speaker(tokenizer, b"abcdefgh", tree, eos=(cycle[at], cycle[-1], 3))
    generation = engine.generate([4], max_new_tokens=30)
    assert "".join(generation) == "abcdefgh"[:at]
    assert generation.tokens == cycle[: at + 1]
    assert generation.generation.stop_reason == "eos"
    ahead = engine.generate([4], max_new_tokens=30, ignore_eos=True)
    assert "".join(ahead) == ("abcdefgh" * 4)[:30] and ahead.generation.stop_reason == "length"
    again = engine.generate([4, *generation.tokens, 4], max_new_tokens=30)
    assert "".join(again) == "abcdefgh"[:at]


@pytest.mark.parametrize("tree", [None, *TREES])
def test_the_budget_is_exact(tokenizer, tree):
    for wrong in ((), tuple(say(b"cf"))):
        engine = speaker(tokenizer, b"abcdefgh", tree, wrong=wrong)
        for count in range(14):
            generation = engine.generate([4], max_new_tokens=count)
            assert "".join(generation) == ("abcdefgh" * 4)[:count]
            assert generation.tokens == (say(b"abcdefgh") * 4)[:count]
            assert generation.generation.stop_reason == "length"


@pytest.mark.parametrize("head", [None, "head.safetensors", "head3.safetensors"])
def test_prompts_fit_up_to_the_last_position(world, plain, head):
    tree = (
        {"tree": "dynamic:nodes=60,levels=8,top_k=10"}
        if head == "head.safetensors"
        else {"tree": "chain:5"}
    )
    head_options = {"draft_checkpoint_path": world / head, **tree} if head else {}
    if head == "head3.safetensors":
        head_options["tree"] = "chain:5"
    engine = load(world / "talon.safetensors", compile=False, max_seq_length=64, **head_options)
    ids = [(7 * i) % VOCAB for i in range(70)]
    for length in (1, 50, 62, 63):
        mine = engine.generate(ids[:length], max_new_tokens=100, ignore_eos=True)
        theirs = plain.generate(ids[:length], max_new_tokens=64 - length, ignore_eos=True)
        list(mine), list(theirs)
        assert mine.tokens == theirs.tokens and len(mine.tokens) == 64 - length
        assert mine.generation.stop_reason == "context"
    for length in (64, 65, 70):
        with pytest.raises(ValueError, match=f"{length} tokens"):
            engine.generate(ids[:length])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", [None, "head.safetensors"])
def test_a_prompt_again_gives_the_same_text_whatever_came_between(world, head, temperature):
    """C11: A, B, A, and a long one before a short one, each equal to a run in a fresh engine."""

    def fresh():
        path = world / head if head else None
        return load(
            world / "talon.safetensors", path, tree="chain:3" if head else "none", compile=False
        )

    def ids(engine, prompt):
        text = engine.generate(
            prompt, max_new_tokens=24, temperature=temperature, seed=3, ignore_eos=True
        )
        list(text)
        return text.tokens

    prompts = ["first prompt", "another one " * 8, "first prompt", "first", "first prompt"]
    wanted = [ids(fresh(), prompt) for prompt in prompts]
    engine = fresh()
    assert [ids(engine, prompt) for prompt in prompts] == wanted


def test_iterating_again_goes_on_and_never_starts_over(plain):
    whole = plain.generate("Hello", max_new_tokens=30, ignore_eos=True)
    wanted = list(whole)
    assert list(whole) == [] and len(whole.tokens) == 30
    text = plain.generate("Hello", max_new_tokens=30, ignore_eos=True)
    first = next(iter(text))
    assert [first, *text] == wanted and text.tokens == whole.tokens


def test_a_text_that_is_left_early_does_not_change_the_next(world, plain):
    for head in (None, world / "head.safetensors"):
        engine = load(
            world / "talon.safetensors", head, tree="chain:3" if head else "none", compile=False
        )
        for _ in engine.generate("Hello there", max_new_tokens=50, ignore_eos=True):
            break
        text, wanted = (
            e.generate("Hello", max_new_tokens=30, ignore_eos=True) for e in (engine, plain)
        )
        assert "".join(text) == "".join(wanted) and text.tokens == wanted.tokens


def test_an_interrupted_prompt_leaves_no_false_memory(world, monkeypatch):
    """Ctrl-C in a notebook while a long prompt is read; the engine is then used again."""
    engine = load(world / "talon.safetensors", compile=False, max_seq_length=LIMIT)

    def ids():
        text = engine.generate([5] * 200, max_new_tokens=8, ignore_eos=True)
        list(text)
        return text.tokens

    wanted = ids()
    real = Decoder.prefill_chunk

    def interrupted(self, tokens, rows, final, *rest):
        real(self, tokens, rows, final, *rest)
        if final:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "prefill_chunk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate([5, *range(6, 205)], max_new_tokens=8))
    assert ids() == wanted


def test_two_texts_at_once_are_refused_not_mixed_up(plain):
    one = plain.generate("one", max_new_tokens=30, ignore_eos=True)
    next(iter(one))
    list(plain.generate("two", max_new_tokens=30, ignore_eos=True))
    with pytest.raises(ValueError, match="another generation"):
        list(one)


def test_texts_that_are_made_first_and_run_later_are_right(plain):
    wanted = [
        "".join(plain.generate(p, max_new_tokens=20, ignore_eos=True)) for p in ("one", "two")
    ]
    texts = [plain.generate(p, max_new_tokens=20, ignore_eos=True) for p in ("one", "two")]
    assert ["".join(text) for text in texts] == wanted


def test_the_prompt_is_copied_not_kept(plain):
    ids = [5, 6, 7]
    text = plain.generate(ids, max_new_tokens=3)
    ids.append(999999)
    list(text)
    assert text.generation.ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": ""}, "stop"),
    ],
)
def test_library_options_out_of_range_raise_at_the_call(plain, options, word):
    with pytest.raises(ValueError, match=word):
        plain.generate("Hello", **options)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        ["text"],
        [1.5],
        {},
        None,
        5,
        [{"role": "user"}],
        [{"content": "x"}],
        "a\udcffb",
        [-1],
        [VOCAB],
        [{"role": "user", "content": "\udcff"}],
    ],
)
def test_library_prompts_that_are_none_raise_at_the_call(plain, prompt):
    with pytest.raises(ValueError):
        plain.generate(prompt)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "float32"}, "fp32"),
        ({"device": "gpu"}, "device"),
        ({"device": "mps"}, "device"),
        ({"tree": "chain:5"}, "head"),
        ({"tree": "what"}, "tree"),
        ({"max_seq_length": 0}, "max_seq_length"),
        ({"max_seq_length": 1}, "max_seq_length"),
        ({"max_seq_length": LIMIT + 1}, str(LIMIT)),
        ({"max_seq_length": -5}, "max_seq_length"),
        ({"draft_checkpoint_path": ""}, "directory"),
    ],
)
def test_load_options_out_of_range_raise(world, options, word):
    with pytest.raises((ValueError, OSError), match=word):
        load(world / "talon.safetensors", compile=False, **options)


def test_top_k_beyond_the_vocabulary_is_no_limit(plain):
    """C51."""

    def ids(top_k):
        text = plain.generate(
            "Hello", max_new_tokens=20, temperature=1.0, top_k=top_k, seed=5, ignore_eos=True
        )
        list(text)
        return text.tokens

    assert ids(0) == ids(-1) == ids(VOCAB) == ids(VOCAB + 1) == ids(10**6) == ids(2**62)


def few_choices(tokenizer, tree: str | None) -> Engine:
    """Five tokens that may follow any other, with known probabilities."""
    log_probs = torch.full((VOCAB, VOCAB), -30.0)
    log_probs[:, 10:15] = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    model = table_model(log_probs, max_seq_length=LIMIT)
    head = table_head(model) if tree else None
    shape = fit_tree(parse_tree(tree), head.config) if tree else NO_TREE
    return Engine(Decoder(model, LIMIT, head, shape, compile=False), tokenizer, (2,), {})


@pytest.mark.parametrize("options, allowed", [
    ({"top_k": 2}, {10, 11}), ({"top_p": 0.6}, {10, 11}), ({"top_k": 1}, {10}),
    ({}, {10, 11, 12, 13, 14}),
])  # fmt: skip
def test_filters_hold_with_a_head(tokenizer, options, allowed):
    """C13, C14: no excluded id is sampled, and drafted ids are plain ids, also where attention
    begins to read more slots (256)."""
    said = []
    for tree in (None, "chain:5", "static"):
        engine = few_choices(tokenizer, tree)
        text = engine.generate([4] * 200, max_new_tokens=120, temperature=1.0, **options)
        list(text)
        said.append(text.tokens)
    assert set(said[0]) == allowed and said[0] == said[1] == said[2]


def test_a_text_that_outgrew_its_context_still_begins_as_the_tokenizer_begins_it(plain):
    talk = Conversation(plain, False, [], room=8)
    talk.limit = 60
    start = plain.encode("")
    assert len(start) == 1  # the world's tokenizer begins with BOS
    lost = []
    for number in range(6):
        ids = talk.prompt(line := f"this is line number {number}\n")
        assert ids[:1] == start and ids.count(start[0]) == 1 and len(ids) <= 60
        assert ids[-3:] == plain.tokenizer.encode(line, add_bos=False)[-3:]
        text = plain.generate(ids, max_new_tokens=8, ignore_eos=True)
        list(text)
        lost.append(talk.add(line, text))
    assert lost[0] is False and any(lost)
