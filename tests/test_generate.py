"""What a run of generate.py gives: text, measurements, conversations."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import table_head, table_model
from world import LIMIT, ROOT, TREES, VOCAB, cycle_of, record, save, save_tokenizer, say

from talon import decoder as decoder_module

# --- the command line: what a run gives -----------------------------------------------------------


def test_text_alone_goes_to_standard_output(cli, plain):
    code, out, err = cli("--prompt", "Hello", "--no_chat", "--max_new_tokens", 12, "--ignore_eos")
    text = plain.generate("Hello", max_new_tokens=12, ignore_eos=True)
    assert (code, out) == (0, "".join(text) + "\n")
    assert "tokens/s" in err and "loaded" in err and "12 tokens (length)" in err


def test_the_template_is_on_by_default_and_knows_the_system_message(cli, plain, tmp_path):
    wanted = {
        (): [{"role": "user", "content": "Hi"}],
        ("--chat",): [{"role": "user", "content": "Hi"}],
        ("--no_chat",): "Hi",
        ("--system", "Be brief"): [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
        ],
    }
    for flags, prompt in wanted.items():
        assert (
            cli("--prompt", "Hi", *flags, "--max_new_tokens", 6, "--json", tmp_path / "o.json")[0]
            == 0
        )
        sample = record(tmp_path / "o.json")["samples"][0]
        text = plain.generate(prompt, max_new_tokens=6)
        list(text)
        assert sample["tokens"] == text.tokens and sample["prompt_tokens"] == len(
            plain.encode(prompt)
        )


def test_the_prompt_may_come_from_a_file_from_standard_input_or_as_ids(cli, plain, tmp_path):
    (tmp_path / "p.txt").write_text("Grüße 😀\n", encoding="utf-8")
    (tmp_path / "bom.txt").write_text("Grüße 😀\n", encoding="utf-8-sig")
    options = ("--no_chat", "--max_new_tokens", 8, "--ignore_eos")
    wanted = "".join(plain.generate("Grüße 😀\n", max_new_tokens=8, ignore_eos=True)) + "\n"
    assert cli("--prompt_file", tmp_path / "p.txt", *options)[:2] == (0, wanted)
    assert cli("--prompt_file", tmp_path / "bom.txt", *options)[:2] == (0, wanted)
    assert cli("--prompt", "-", *options, stdin="Grüße 😀\n")[:2] == (0, wanted)
    ids = plain.encode("Grüße 😀\n")
    for words in (" ".join(map(str, ids)), ", ".join(map(str, ids))):
        assert cli("--prompt_ids", words, "--max_new_tokens", 8, "--ignore_eos")[:2] == (0, wanted)


def test_ids_need_no_tokenizer_and_answer_in_ids(cli, plain, world, tmp_path):
    bare = world / "bare" / "talon.safetensors"
    json_path = tmp_path / "o.json"
    code, out, _ = cli(
        "--prompt_ids",
        "5 6 7",
        "--max_new_tokens",
        5,
        "--ignore_eos",
        "--json",
        json_path,
        target=bare,
    )
    text = plain.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True)
    list(text)
    assert code == 0 and [int(word) for word in out.split()] == text.tokens
    assert record(json_path)["samples"][0]["tokens"] == text.tokens
    assert record(json_path)["samples"][0]["text"] is None


def test_json_holds_every_promised_key_with_a_sane_value(cli, world, tmp_path):
    path = tmp_path / "o.json"
    argv = [
        "--prompt",
        "Hello",
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        "chain:3",
    ]
    argv += [
        "--max_new_tokens",
        30,
        "--ignore_eos",
        "--num_samples",
        2,
        "--temperature",
        0.8,
        "--json",
        path,
        "--check",
    ]
    assert cli(*argv)[0] == 0
    top = record(path)
    assert top["argv"] == [
        "--checkpoint_path",
        str(world / "talon.safetensors"),
        *map(str, argv),
        "--no_compile",
    ]
    assert (
        top["device"].startswith("cpu") and top["dtype"] == "fp32" and top["quantization"] is None
    )
    assert top["tree"] == "chain:3" and "eagle1" in top["head"]
    assert top["compile_s"] == 0 and top["recompiles"] == 0 and top["load_s"] > 0
    assert top["versions"]["torch"] == torch.__version__ and top["versions"]["python"]
    assert top["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", top["commit"])
    assert top["check"] == {"identical": True, "first_difference": None, "gap": None}
    assert len(top["samples"]) == 2
    for index, sample in enumerate(top["samples"]):
        assert (
            sample["seed"] == index
            and len(sample["tokens"]) == 30
            and sample["stop_reason"] == "length"
        )
        assert sample["prompt_tokens"] > 5 and isinstance(sample["text"], str)
        assert sample["prefill_s"] > 0 and sample["decode_s"] > 0
        assert 0 < sample["draft_s"] + sample["verify_s"] <= sample["decode_s"]
        assert 1 <= sample["rounds"] <= 29
        assert sample["acceptance_length"] == pytest.approx(29 / sample["rounds"])
        assert sum(sample["accepted_by_depth"]) == 29 - sample["rounds"]
        assert sample["tokens_per_s"] == pytest.approx(
            29 / sample["decode_s"]
        )  # decoding alone: not the first token
        assert sample["peak_memory_bytes"] > 10**7 and sample["bandwidth_bytes_per_s"] > 0
    assert top["samples"][0]["tokens"] != top["samples"][1]["tokens"]


def test_nothing_generated_is_reported_without_a_division_by_zero(cli, tmp_path):
    for count in (0, 1):
        code, out, err = cli(
            "--prompt",
            "Hi",
            "--max_new_tokens",
            count,
            "--ignore_eos",
            "--json",
            tmp_path / "o.json",
        )
        sample = record(tmp_path / "o.json")["samples"][0]
        assert code == 0 and len(sample["tokens"]) == count and sample["tokens_per_s"] == 0
        assert (
            sample["rounds"] == 0
            and sample["acceptance_length"] == 0
            and sample["stop_reason"] == "length"
        )
        assert f"{count} tokens (length)" in err and (count or out == "\n")


def test_json_is_written_over_an_old_file_as_a_whole(cli, tmp_path):
    path = tmp_path / "o.json"
    path.write_text("x" * 100_000)
    assert cli("--prompt", "Hi", "--max_new_tokens", 2, "--json", path)[0] == 0
    assert len(record(path)["samples"]) == 1 and os.listdir(tmp_path) == ["o.json"]


def test_argv_that_is_no_text_still_makes_valid_json(cli, tmp_path):
    path = tmp_path / "o.json"
    code, *_ = cli("--prompt_ids", "5", "--max_new_tokens", 2, "--json", tmp_path / "\udcff.json")
    assert code == 0
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_bytes())["argv"][-2].endswith("\udcff.json")


def test_seeds_decide_and_samples_count_up_from_the_seed(cli, tmp_path):
    """C15."""

    def texts(*flags):
        argv = (
            "--prompt",
            "Hi",
            "--temperature",
            1,
            "--max_new_tokens",
            12,
            "--ignore_eos",
            "--json",
            tmp_path / "o",
        )
        assert cli(*argv, *flags)[0] == 0
        return [tuple(sample["tokens"]) for sample in record(tmp_path / "o")["samples"]]

    four = texts("--num_samples", 4, "--seed", 7)
    assert len(set(four)) == 4
    assert [texts("--seed", seed)[0] for seed in (7, 8, 9, 10)] == four
    assert texts("--num_samples", 2, "--seed", 2**63 - 2)


@pytest.mark.parametrize("temperature", ["0", "1e-8", "0.0", "1e-30", "-0.0"])
def test_a_tiny_temperature_is_greedy(cli, temperature):
    """C50."""
    argv = ("--prompt", "Hi", "--max_new_tokens", 12, "--ignore_eos")
    greedy = cli(*argv)[1]
    assert cli(*argv, "--temperature", temperature, "--top_k", 3, "--top_p", 0.5)[1] == greedy


def test_flags_without_effect_are_pointed_out(cli):
    _, _, err = cli("--prompt", "Hi", "--top_k", 5, "--max_new_tokens", 2)
    assert "note: temperature 0 is greedy" in err
    _, _, err = cli("--prompt", "Hi", "--highlight", "--max_new_tokens", 2)
    assert "note: --highlight" in err
    _, _, err = cli("--prompt", "Hi", "--top_k", 5, "--temperature", 1, "--max_new_tokens", 2)
    assert "note:" not in err


def test_stop_texts_repeat_on_the_command_line(cli, plain, tmp_path):
    text = "".join(plain.generate("Hello", max_new_tokens=40, ignore_eos=True))
    stop = text[15:18]
    argv = (
        "--prompt",
        "Hello",
        "--no_chat",
        "--max_new_tokens",
        40,
        "--ignore_eos",
        "--json",
        tmp_path / "o",
    )
    code, out, err = cli(*argv, "--stop", "never said", "--stop", stop)
    assert code == 0 and out == text[: text.find(stop)] + "\n" and "(stop)" in err
    assert record(tmp_path / "o")["samples"][0]["stop_reason"] == "stop"


@pytest.mark.parametrize("tree", ["none", pytest.param("auto", marks=pytest.mark.slow), *TREES])
@pytest.mark.parametrize("head", ["head.safetensors", "head3.safetensors"])
def test_every_tree_gives_the_plain_text(cli, world, tree, head):
    argv = (
        "--prompt",
        "Hello",
        "--max_new_tokens",
        16,
        "--ignore_eos",
        "--temperature",
        0.7,
        "--top_p",
        0.9,
    )
    wanted = cli(*argv)[1]
    if head == "head3.safetensors" and tree == "auto":
        pytest.skip("one EAGLE-3 preset is among the trees")
    code, out, err = cli(*argv, "--draft_checkpoint_path", world / head, "--tree", tree, "--check")
    assert (code, out) == (0, wanted) and "identical to plain decoding" in err


def test_a_tree_may_come_from_a_file(cli, world, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    argv = ("--prompt", "Hello", "--max_new_tokens", 16, "--ignore_eos")
    head = ("--draft_checkpoint_path", world / "head.safetensors", "--tree", tmp_path / "tree.json")
    code, out, err = cli(*argv, *head)
    assert code == 0 and out == cli(*argv)[1] and "tree.json" in err


def test_the_head_is_described_and_a_useless_one_flagged(cli, world):
    argv = ("--prompt", "Hello", "--max_new_tokens", 60, "--ignore_eos", "--tree", "chain:2")
    _, _, err = cli(*argv, "--draft_checkpoint_path", world / "head.safetensors")
    for word in (
        "head: eagle1",
        "RoPE base",
        "draft vocabulary 264 of 264",
        "from the target: embedding, lm_head",
    ):
        assert word in err
    assert "acceptance length 1.0" in err and "warning: acceptance length" in err


def write_speaker(directory: Path, text: bytes) -> tuple[Path, Path]:
    model = table_model(cycle_of(say(text)), max_seq_length=LIMIT)
    save_tokenizer(directory)
    target = save(directory / "talon.safetensors", model, "target", eos_ids=[2])
    return target, save(directory / "head.safetensors", table_head(model), "draft")


def test_highlight_colours_what_the_draft_guessed_and_changes_no_character(cli, tmp_path):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        8,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
    )
    assert cli(*argv, target=target)[1] == "abcdefgh\n"
    code, out, _ = cli(*argv, "--highlight", target=target)
    green, end = "\033[32m", "\033[0m"
    # The prefill gives a; then every round two drafted tokens and the bonus.
    assert out == f"a{green}b{end}{green}c{end}d{green}e{end}{green}f{end}g{green}h{end}\n"


def test_a_failed_check_is_reported_and_ends_with_code_1(cli, tmp_path, monkeypatch):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    honest = decoder_module.verify

    def corrupt(target, nodes, *rest):
        verdict = honest(target, nodes, *rest)
        return verdict._replace(tokens=(verdict.tokens + (len(nodes.tokens) > 1)) % VOCAB)

    monkeypatch.setattr(decoder_module, "verify", corrupt)
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        8,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
    )
    for more in ((), ("--temperature", 1), ("--temperature", 1, "--top_k", 2)):
        code, _, err = cli(*argv, "--check", "--json", tmp_path / "o.json", *more, target=target)
        check = record(tmp_path / "o.json")["check"]
        assert code == 1 and check["identical"] is False and check["first_difference"] == 1
        assert check["gap"] is None or check["gap"] > 0
        assert "first_difference" in err
    assert cli(*argv, target=target)[0] == 0


def test_a_check_sees_a_text_that_only_ends_too_early(cli, tmp_path, monkeypatch):
    target, head = write_speaker(tmp_path, b"abcdefgh")
    real = decoder_module.Generation.take

    def hasty(self, token):
        real(self, token)
        if self.decoder.tree.nodes > 1 and len(self.tokens) >= 4:
            self.end("length")
        return token

    monkeypatch.setattr(decoder_module.Generation, "take", hasty)
    argv = (
        "--prompt",
        "x",
        "--max_new_tokens",
        20,
        "--draft_checkpoint_path",
        head,
        "--tree",
        "chain:2",
        "--check",
    )
    code, _, _ = cli(*argv, "--json", tmp_path / "o.json", target=target)
    check = record(tmp_path / "o.json")["check"]
    assert code == 1 and check["identical"] is False and check["first_difference"] == 4


def test_a_profile_is_a_whole_trace_and_the_only_file(cli, tmp_path):
    code, _, err = cli("--prompt", "Hi", "--max_new_tokens", 3, "--profile", tmp_path / "t.json")
    assert code == 0 and "trace written" in err and os.listdir(tmp_path) == ["t.json"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_low_precision_runs(cli, tmp_path):
    for dtype in ("bf16", "fp16", "fp32"):
        code, _, err = cli(
            "--prompt", "Hi", "--max_new_tokens", 4, "--dtype", dtype, "--json", tmp_path / "o"
        )
        assert code == 0 and dtype in err and record(tmp_path / "o")["dtype"] == dtype


# --- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, "head.safetensors"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_turn_equals_a_fresh_run_with_the_same_history(
    cli, world, plain, tmp_path, head, temperature
):
    """C11 and C59: A, B, A as turns; also blank lines, and a last line without its end."""
    draft = ("--draft_checkpoint_path", world / head, "--tree", "chain:4") if head else ()
    argv = (
        "--interactive",
        "--system",
        "S",
        "--max_new_tokens",
        9,
        "--temperature",
        temperature,
        "--seed",
        4,
        "--json",
        tmp_path / "o",
    )
    lines = ["first", "second, longer", "first"]
    code, out, err = cli(*argv, *draft, stdin="first\n\n  \nsecond, longer\nfirst")
    assert code == 0
    history = [{"role": "system", "content": "S"}]
    samples = record(tmp_path / "o")["samples"]
    assert len(samples) == 3
    texts = []
    for line, sample in zip(lines, samples, strict=True):
        history.append({"role": "user", "content": line})
        plain.decoder.forget()
        text = plain.generate(history, max_new_tokens=9, temperature=temperature, seed=4)
        texts.append("".join(text))
        assert sample["tokens"] == text.tokens and sample["text"] == texts[-1]
        assert sample["prompt_tokens"] == len(plain.encode(history))
        history.append({"role": "assistant", "content": texts[-1]})
    assert out == "".join(f"{text}\n" for text in texts)
    assert err.count("> ") == 6


def test_without_a_template_turns_continue_one_text(cli, plain, tmp_path):
    argv = (
        "--interactive",
        "--no_chat",
        "--max_new_tokens",
        6,
        "--ignore_eos",
        "--json",
        tmp_path / "o",
    )
    assert cli(*argv, stdin="one\ntwo\n")[0] == 0
    first, second = record(tmp_path / "o")["samples"]
    ids = plain.encode("one\n")
    assert ids[0] == 0 and first["prompt_tokens"] == len(ids)
    ids = [*ids, *first["tokens"], *plain.tokenizer.encode("two\n", add_bos=False)]
    text = plain.generate(ids, max_new_tokens=6, ignore_eos=True)
    list(text)
    assert second["prompt_tokens"] == len(ids) and second["tokens"] == text.tokens


def test_a_line_that_does_not_fit_is_refused_and_forgotten(cli, plain, tmp_path):
    argv = (
        "--interactive",
        "--max_new_tokens",
        4,
        "--max_seq_length",
        100,
        "--json",
        tmp_path / "o",
    )
    code, out, err = cli(*argv, stdin="hi\n" + "x" * 200 + "\n\udcff\nhi\n")
    samples = record(tmp_path / "o")["samples"]
    assert code == 2 and len(samples) == 2
    assert (
        err.count("error: ") == 2
        and "error: the prompt has" in err
        and "error: the text holds bytes" in err
    )
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": samples[0]["text"]},
    ]
    history.append({"role": "user", "content": "hi"})
    assert samples[1]["prompt_tokens"] == len(plain.encode(history))


@pytest.mark.parametrize("chat", ["--chat", "--no_chat"])
def test_a_full_context_lets_the_oldest_turns_fall_away(cli, plain, tmp_path, chat):
    argv = ("--interactive", chat, "--max_new_tokens", 8, "--max_seq_length", 120, "--ignore_eos")
    system = ("--system", "S") if chat == "--chat" else ()
    lines = [f"this is line number {n}" for n in range(9)]
    code, _, err = cli(*argv, *system, "--json", tmp_path / "o", stdin="\n".join(lines))
    samples = record(tmp_path / "o")["samples"]
    assert code == 0 and len(samples) == 9 and "error" not in err
    assert all(len(s["tokens"]) == 8 and s["prompt_tokens"] <= 112 for s in samples)
    assert err.count("oldest turns fell away") >= 3
    if chat == "--chat":  # the last prompt is the system message, whole turns, and the new line
        history = [{"role": "system", "content": "S"}]
        said = [{"role": "user", "content": lines[-1]}]
        last = [
            {"role": "user", "content": lines[-2]},
            {"role": "assistant", "content": samples[-2]["text"]},
        ]
        counts = [len(plain.encode([*history, *kept, *said])) for kept in ([], last)]
        assert samples[-1]["prompt_tokens"] in counts


def test_an_end_at_once_is_no_error(cli, tmp_path):
    code, out, _ = cli("--interactive", "--json", tmp_path / "o", stdin="")
    assert (code, out) == (0, "") and record(tmp_path / "o")["samples"] == []


def hear_ctrl_c():
    """A test run in the background inherits a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_a_conversation_quietly_and_keeps_its_turns(world, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--checkpoint_path",
        str(world / "talon.safetensors"),
    ]
    command += [
        "--no_compile",
        "--interactive",
        "--max_new_tokens",
        "4",
        "--json",
        str(tmp_path / "o"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_ctrl_c
    ) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "error" not in err
    assert len(record(tmp_path / "o")["samples"]) == 1


def test_ctrl_c_while_decoding_leaves_quietly_and_writes_nothing(world, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--checkpoint_path",
        str(world / "talon.safetensors"),
    ]
    command += ["--no_compile", "--prompt", "x", "--ignore_eos", "--num_samples", "100000"]
    command += [
        "--temperature",
        "1",
        "--json",
        str(tmp_path / "o"),
        "--profile",
        str(tmp_path / "p"),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "error" not in err
    assert list(tmp_path.iterdir()) == []
