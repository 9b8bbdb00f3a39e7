"""What the benchmark compares: our methods and other programs show one face."""

import importlib.util
import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from tiny import GOLDEN, cycle_table, random_model, table_head, table_model

import benchmark
from talon.decoder import Decoder
from talon.loading import Files
from talon.measuring import methods
from talon.measuring.methods import LlamaCppPeer, Peer, TalonMethod, Target, Task
from talon.sampling import SamplingConfig
from talon.trees import parse_tree

GREEDY = SamplingConfig()


def chain_method(name: str, tree: str) -> TalonMethod:
    model = table_model(cycle_table(24))
    decoder = Decoder(model, 64, table_head(model), parse_tree(tree), compile=False)
    return TalonMethod(name, "target", {0.0: decoder})


def test_a_method_reports_its_own_tree_and_memory():
    method = chain_method("m", "chain:3")
    task = Task([1, 2], GREEDY, 20, frozenset())
    (decoded,) = benchmark.measure_prompt([method], task, on_gpu=False)
    stats = decoded.stats
    assert decoded.tokens == [(3 + i) % 24 for i in range(20)]
    assert stats.rounds == 5 and stats.emitted == 19 and stats.accepted_by_depth[0] == 5
    assert decoded.moved_bytes > 0 and decoded.peak_memory_bytes > 0
    assert method.trees == {0.0: "chain:3"}
    layers = method.decoders[0.0].model.layers
    assert method.memory_bytes > sum(p.numel() * 4 for p in layers.parameters())


def test_every_prompt_is_timed_with_its_own_prefill():
    method = chain_method("m", "chain:3")
    task = Task([1, 2, 3, 4], GREEDY, 5, frozenset())
    first, again = (benchmark.measure_prompt([method], task, False)[0] for _ in range(2))
    assert first.tokens == again.tokens and first.stats.rounds == again.stats.rounds
    assert method.decoders[0.0].reusable(task.ids) > 0  # what the second one did not use


def test_methods_of_one_target_take_turns_by_rounds(monkeypatch):
    order, launch = [], Decoder.launch
    pair = [chain_method("a", "chain:3"), chain_method("b", "chain:1")]
    names = {id(method.decoders[0.0]): method.name for method in pair}

    def seen(self, *args):
        order.append(names[id(self)])
        return launch(self, *args)

    monkeypatch.setattr(Decoder, "launch", seen)
    task = Task([1, 2], GREEDY, 9, frozenset())
    long, short = benchmark.measure_prompt(pair, task, on_gpu=False)
    assert long.tokens == short.tokens and (long.stats.rounds, short.stats.rounds) == (2, 4)
    assert order == list("abbabb")


# ---------------------------------------------------------------- other programs


class Known(Peer):
    """A program whose answers are known: 1, 2, 3, ... , two tokens a forward."""

    def decode(self, task, mark):
        tokens = list(range(1, task.budget + 1))
        for count in range(1, task.budget + 1, 2):
            mark(count)
        return tokens


def test_a_peer_is_timed_by_its_forwards():
    task = Task([5], GREEDY, 7, frozenset())
    (decoded,) = benchmark.measure_prompt([Known("peer", 7)], task, on_gpu=True)
    assert decoded.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert decoded.stats.rounds == 3 and decoded.stats.emitted == 6
    assert decoded.stats.prefill_s >= 0 and decoded.stats.decode_s >= 0
    one = benchmark.measure_prompt([Known("peer", 7)], task._replace(budget=1), False)[0]
    assert one.tokens == [1] and one.stats.rounds == one.stats.emitted == 0


def test_a_peer_stands_in_the_results_next_to_ours():
    plain = chain_method("target plain", "none")
    plain.decoders[1.0], plain.trees[1.0], plain.plain = plain.decoders[0.0], "none", True
    args = Namespace(
        temperature=[0.0, 1.0], max_new_tokens=8, repeats=2, seed=0, device="cpu", out=None
    )
    compared, prompts = [plain, Known("peer", 7)], [[1, 2], [3]]
    cells = list(benchmark.measure(compared, prompts, args, frozenset()))
    assert len(cells) == 2 * 2 * 2 * 2
    rows = benchmark.results(compared, cells, prompts, args)
    ours, greedy, _, sampled = rows
    assert (greedy["method"], greedy["temperature"]) == ("peer", 0.0)
    assert greedy["draft_ms"] is None and greedy["bandwidth_bytes_per_s"] is None
    assert greedy["times_plain"] > 0 and greedy["ids"]["identical"] == 0
    assert "ids" not in sampled, "another sampler: its ids mean nothing"
    assert "ids" not in ours


def arguments(peers: str, **options) -> Namespace:
    return Namespace(peers=peers, gguf=None, **options)


def target_in(directory) -> Target:
    model = random_model()
    checkpoint = Namespace(processes=1, path=directory / "t.safetensors")
    return Target("fp32", Files(checkpoint, model.config, None), model, [])


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="llama.cpp is not installed: pip install"):
        methods.peer_names("llama.cpp")
    assert methods.open_peers(arguments("auto"), target_in(tmp_path), 64) == []
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all("pip install" in line for line in said)


def test_unknown_and_impossible_peers_are_one_line(tmp_path, monkeypatch, capsys):
    assert methods.peer_names("none") == []
    with pytest.raises(ValueError, match="vllm.*is not known.*llama.cpp"):
        methods.peer_names("vllm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for name, missing in (("llama.cpp", "GGUF"), ("transformers", "config.json")):
        with pytest.raises(ValueError, match=f"peer {name}.*{missing}"):
            methods.open_peers(arguments(name), target_in(tmp_path), 64)
    assert methods.open_peers(arguments("auto"), target_in(tmp_path), 64) == []
    assert capsys.readouterr().err.count("without ") == 4


class Llama:
    """Stands in for llama-cpp-python's class: counts on from the last token."""

    def __init__(self, path: str, **options: object) -> None:
        self.options = options

    def reset(self) -> None:
        pass

    def set_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**31

    def generate(self, ids: list[int], **options: object):
        yield from range(ids[-1] + 1, 1000)


def test_llama_cpp_runs_where_ours_does_or_is_refused(tmp_path, monkeypatch):
    package = ModuleType("llama_cpp")
    package.Llama, package.llama_supports_gpu_offload = Llama, lambda: False
    speculative = ModuleType("llama_cpp.llama_speculative")
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    path = tmp_path / "Model.Q4_1.gguf"
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match="built without a GPU"):
        LlamaCppPeer(path, 64, torch.device("cuda"))
    peer = LlamaCppPeer(path, 64, torch.device("cpu"))
    assert peer.llama.options["n_gpu_layers"] == 0
    assert (peer.name, peer.memory_bytes) == ("llama.cpp Q4_1", 5)
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: num_pred_tokens
    peer = LlamaCppPeer(path, 64, torch.device("cpu"), lookup=True)
    assert peer.name == "llama.cpp-lookup Q4_1" and peer.llama.options["draft_model"] == 10
    task = Task([1, 2], SamplingConfig(1.0, seed=2**40), 6, frozenset({7}))
    (decoded,) = benchmark.measure_prompt([peer], task, on_gpu=False)
    assert decoded.tokens == [3, 4, 5, 6, 7] and decoded.stats.rounds == 4
    package.llama_supports_gpu_offload = lambda: True
    assert LlamaCppPeer(path, 64, torch.device("cuda")).llama.options["n_gpu_layers"] == -1


def test_transformers_gets_our_device_and_precision(tmp_path, monkeypatch):
    package, asked = ModuleType("transformers"), {}

    class AutoModelForCausalLM:
        @staticmethod
        def from_pretrained(directory, dtype, **_):
            asked["dtype"] = dtype
            return torch.nn.Linear(4, 4, dtype=dtype)

    package.AutoModelForCausalLM = AutoModelForCausalLM
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "config.json").write_text("{}")
    target = target_in(tmp_path)
    target.model.to("meta", torch.bfloat16)
    (peer,) = methods.open_peers(arguments("transformers"), target, 64)
    assert asked["dtype"] == torch.bfloat16
    assert peer.model.weight.device.type == "meta" and peer.memory_bytes == 2 * 20


@pytest.mark.slow
def test_transformers_gives_our_greedy_ids_and_counts_its_forwards():
    pytest.importorskip("transformers")
    target = target_in(GOLDEN / "eagle2_tiny_seed0" / "target")
    peers = methods.open_peers(arguments("transformers,transformers-lookup"), target, 64)
    plain, lookup = peers
    assert plain.model is lookup.model
    assert plain.model.dtype == torch.float32 and plain.model.device.type == "cpu"
    task = Task([1, 2, 3, 1, 2, 3], GREEDY, 20, frozenset())
    first, second = (benchmark.measure_prompt([peer], task, False)[0] for peer in peers)
    assert first.tokens == second.tokens and len(first.tokens) == 20
    assert first.stats.rounds == first.stats.emitted == 19
    assert second.stats.rounds <= second.stats.emitted
