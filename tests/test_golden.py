"""The reference implementation's own numbers, reproduced in fp32: features, head logits, trees,
acceptance, ids.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import GOLDEN, converted

from talon.checking import full_logits
from talon.decoder import Generation
from talon.sampling import SamplingConfig
from talon.text import load

SETS = {
    "eagle1_static_seed0": "static",
    "eagle2_tiny_seed0": "dynamic:nodes=24,levels=5,top_k=5",
    "eagle2_tiny_seed1": "dynamic:nodes=24,levels=5,top_k=5",
    "eagle3_tiny_seed0": "dynamic:nodes=24,levels=5,top_k=5",
    "eagle3_tiny_seed1": "dynamic:nodes=24,levels=5,top_k=5",
}


class Recorder:
    """Watches a drafter: every tree it proposes, every forward of its head with the logits, all it
    learns.
    """

    def __init__(self, decoder) -> None:
        drafter = decoder.drafter
        self.trees, self.levels, self.logits, self.learned = [], [], [], []
        head = drafter.stage.module
        propose, absorb, logits = drafter.propose, drafter.learn, head.logits

        def spy_propose(root, at, pick):
            length = int(at.length)
            self.levels.append([])
            self.logits.append([])
            nodes = propose(root, at, pick)
            self.trees.append((length, *nodes))
            return nodes

        def spy_learn(entries, at):
            features, path, tokens, start, last, *_ = entries
            count = int(last) + 1
            entry = {
                "features": torch.cat([f[path] for f in features], -1)[:count],
                "ids": tokens[:count].clone(),
            }
            entry["start"] = int(start)
            self.learned.append(entry)
            absorb(entries, at)

        def spy_logits(hidden):
            values = logits(hidden)
            if self.logits:
                self.logits[-1].append(values.clone())
            return values

        def hook(module, args, output):
            if self.levels and len(self.trees) < len(self.levels):  # growing, not catching up
                self.levels[-1].append((args[0].clone(), args[1].clone(), output.clone()))
            else:
                self.learned[-1]["out"] = output[: len(self.learned[-1]["ids"])].clone()

        drafter.propose, drafter.learn, head.logits = spy_propose, spy_learn, spy_logits
        drafter.read = spy_learn
        head.register_forward_hook(hook)


@pytest.fixture(
    scope="module", params=[(name, prompt) for name in SETS for prompt in ("p12", "p33")]
)
def run(request, tmp_path_factory):
    name, prompt = request.param
    base = tmp_path_factory.getbasetemp() / "golden" / name
    target = converted(GOLDEN / name / "target", base / "target.safetensors")
    head = converted(GOLDEN / name / "head", base / "head.safetensors")
    engine = load(target, head, tree=SETS[name], compile=False, max_seq_length=256)
    golden = load_file(GOLDEN / name / "golden.safetensors")
    golden = {
        key[len(prompt) + 1 :]: value for key, value in golden.items() if key.startswith(prompt)
    }
    recorder = Recorder(engine.decoder)
    ids = golden["prompt_ids"].tolist()
    generation = Generation(engine.decoder, ids, SamplingConfig(), len(golden["eagle_ids"]))
    counts = [0] * len(golden["eagle_ids"])
    for _ in generation:
        counts[generation.stats.rounds] += 1
    counts = counts[: generation.stats.rounds + 1]
    return name, golden, engine, recorder, generation, counts


def close(mine, theirs, atol=1e-4):
    torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-4)


def test_ids_equal_plain_greedy_and_the_reference_loop(run):
    _, golden, _, _, generation, _ = run
    assert generation.tokens == golden["eagle_ids"].tolist()
    assert generation.tokens[: len(golden["naive_ids"])] == golden["naive_ids"].tolist()


def test_accepted_lengths_of_every_round(run):
    _, golden, _, _, _, counts = run
    rounds = golden["accept_len"].tolist()
    # The reference counts the root with its round; here the first root comes from the prefill and a
    # round's count is its accepted nodes and the bonus. Only the last round may be cut by the token
    # budget.
    assert [count - 1 for count in counts[1:]][: len(rounds) - 1] == rounds[:-1]


def test_trees_of_every_round(run):
    name, golden, _, recorder, _, _ = run
    for index, (length, tokens, parents, ancestors) in enumerate(
        recorder.trees[: len(golden["accept_len"])]
    ):
        assert length == golden["n_committed"][index]
        assert tokens.tolist() == golden["draft_tokens"][index].tolist(), f"round {index + 1}"
        if name.startswith("eagle1"):
            tree = json.loads((GOLDEN / name / "golden.json").read_text())["tree"]
            assert parents.tolist()[1:] == tree["parent"][1:]
            assert (ancestors.sum(1) - 1).tolist() == tree["position_ids"]
            continue
        assert parents.tolist()[1:] == golden["tree_parent"][index].tolist()[1:]
        assert (ancestors.sum(1) - 1).tolist() == golden["tree_position_ids"][index].tolist()
        assert torch.equal(ancestors, golden["tree_mask"][index].bool())


def test_prompt_features_and_logits_of_the_target(run):
    _, golden, engine, recorder, _, _ = run
    logits = full_logits(engine.decoder.model, golden["prompt_ids"].tolist())
    close(logits[-4:], golden["target_logits_last4"])
    first = recorder.learned[0]
    close(first["features"], golden["r1.catchup_features"])
    wanted = golden.get("target_aux_hidden")
    wanted = golden["target_hidden_postnorm"] if wanted is None else torch.cat(list(wanted), -1)
    close(first["features"], wanted)


def test_catch_up_pairs_positions_and_outputs(run):
    _, golden, _, recorder, _, _ = run
    for index in range(3):
        entry, key = recorder.learned[index], f"r{index + 1}.catchup_"
        assert entry["ids"].tolist() == golden[key + "ids"].tolist()
        assert entry["start"] == golden[key + "position_ids"][0]
        close(entry["features"], golden[key + "features"])
        close(entry["out"], golden[key + "out"])


def test_head_states_and_logits_of_every_level(run):
    _, golden, _, recorder, _, _ = run
    for index in range(3):
        key = f"r{index + 1}."
        close(recorder.logits[index][0][0], golden[key + "root_logits"].flatten())
        for level, (tokens, hidden, out) in enumerate(recorder.levels[index], start=1):
            wanted = golden[f"{key}level{level}_tokens"].flatten().tolist()
            width = len(wanted)  # static trees pad a narrow level
            assert tokens[:width].tolist() == wanted
            close(hidden[:width], golden[f"{key}level{level}_in_features"].view(width, -1))
            close(out[:width], golden[f"{key}level{level}_out"].view(width, -1))
            close(
                recorder.logits[index][level][:width],
                golden[f"{key}level{level}_logits"].view(width, -1),
            )
