"""Generate text: the command line, from flags to a streamed answer and its measurements.

    python generate.py --checkpoint_path F --prompt "Why is the sky blue?"
    python generate.py --checkpoint_path F --draft_checkpoint_path H --interactive

Text goes to standard output, everything else to standard error. Leaves out: the engine that it runs
(talon/text.py)."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("generate", shared=True)

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from talon.cli import DEMO, Parser, add_files, add_running_options, check_output, note
from talon.decoder import Decoder
from talon.loading import Files, fit_context, open_files, shared
from talon.records import Results, compilations, write_json
from talon.sampling import SamplingConfig
from talon.text import (
    Engine,
    Options,
    TextGeneration,
    check_ends,
    encode,
    load,
    load_files,
    read_options,
)
from talon.tokenizer import TOKENIZER_FILES, Tokenizer, is_text

__all__ = ["Engine", "TextGeneration", "load", "main"]


# ---------------------------------------------------------------- the flags


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="generate.py", description="Generate text with a converted checkpoint.")
    add_prompt_options(parser)
    add_text_options(parser.add_argument_group("the text").add_argument)
    add = add_running_options(parser)
    add("--retune", action="store_true", help="let --tree auto measure again")
    add("--profile", help="write a Chrome trace of the last sample to this file")
    return parser.parse_args(argv)


def add_prompt_options(parser: Parser) -> None:
    add_files(parser.add_argument)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", help="text; - reads standard input")
    given.add_argument("--prompt_file", type=Path, help="file with the prompt, UTF-8")
    given.add_argument("--prompt_ids", help='token ids, such as "1 2 3"; needs no tokenizer')
    given.add_argument("--interactive", action="store_true", help="converse, one line a turn")
    chat, no = parser.add_mutually_exclusive_group(), {"dest": "chat", "action": "store_false"}
    chat.add_argument("--chat", action="store_true", default=None, help="use the chat template")
    chat.add_argument("--no_chat", default=None, help="give the text as it is", **no)
    parser.add_argument("--system", help="system message of the chat")
    more = {"type": template_option, "action": "append", "default": [], "metavar": "NAME=VALUE"}
    more["help"] = "variable of the chat template, in JSON: enable_thinking=false; may be repeated"
    parser.add_argument("--template_option", **more)


def template_option(given: str) -> tuple[str, object]:
    """A variable of the chat template and its value."""
    name, _, value = given.partition("=")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        advice = "give NAME=VALUE, the value in JSON, as in enable_thinking=false"
        raise ArgumentTypeError(f"{given[:60]!r}: {advice}") from None


def add_text_options(add: Callable) -> None:
    add("--max_new_tokens", type=int, default=256, help="tokens to generate at most")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_k", type=int, default=0, help="choose among this many best tokens; 0: all")
    add("--top_p", type=float, default=1.0, help="choose among the best of this total probability")
    add("--seed", type=int, default=0, help="the text is a function of prompt and seed")
    add("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
    add("--ignore_eos", action="store_true", help="go on past the model's stop tokens")
    add("--num_samples", type=int, default=1, help="texts to generate: seeds seed, seed+1, ...")
    add("--check", action="store_true", help="compare with plain decoding: exit code 1 if unequal")
    add("--highlight", action="store_true", help="colour the tokens that the draft guessed")
    add("--json", help="write measurements and ids to this file")


def check_args(args: Namespace) -> None:
    """Refuse bad values, and flags that would have no effect, before anything is read."""
    if args.num_samples < 1:
        raise ValueError(f"num_samples {args.num_samples} is not allowed: give at least 1")
    if args.retune and (args.tree != "auto" or args.draft_checkpoint_path == "none"):
        raise ValueError("--retune is for --tree auto and takes a head: --draft_checkpoint_path")
    if args.keep_head and args.draft_checkpoint_path == "none":
        raise ValueError("--keep_head takes a head: give --draft_checkpoint_path")
    check_ends(args.max_new_tokens, tuple(args.stop))
    for flag, text in (("--system", args.system or ""), *(("--stop", stop) for stop in args.stop)):
        if not is_text(text):
            raise ValueError(f"{flag} holds bytes that are not UTF-8: give UTF-8 text")
    for index in (0, args.num_samples - 1):
        sampling_of(args, index)
    alone = {"check": args.check, "num_samples": args.num_samples > 1, "profile": args.profile}
    idle = ", ".join(f"--{name}" for name, given in alone.items() if given)
    if args.interactive and idle:
        raise ValueError(f"{idle} cannot be used with --interactive: give --prompt instead")
    if args.prompt_ids is not None and (args.chat or args.system is not None):
        raise ValueError("--chat and --system do not go with --prompt_ids: give --prompt instead")
    check_outputs(args)


def check_outputs(args: Namespace) -> None:
    inputs = [args.checkpoint_path, Path(args.draft_checkpoint_path)]
    inputs.append(Path(args.tree.partition("+lookup:")[0]))
    inputs += [args.prompt_file] if args.prompt_file else []
    inputs += [args.checkpoint_path.with_name(name) for name in TOKENIZER_FILES]
    for flag in ("json", "profile"):
        if getattr(args, flag) is not None:
            check_output(f"--{flag}", Path(getattr(args, flag)), inputs)
    if args.json is not None and args.profile is not None and Path(args.json) == Path(args.profile):
        raise ValueError(f"--json and --profile are both {args.json}: give each a file of its own")


def sampling_of(args: Namespace, index: int = 0) -> SamplingConfig:
    """How sample number `index` is chosen."""
    return SamplingConfig(args.temperature, args.top_k, args.top_p, args.seed + index)


# ---------------------------------------------------------------- the prompt


def read_prompt(args: Namespace) -> str | list[int] | None:
    """The prompt as text or as ids; None when conversing."""
    if args.interactive:
        return None
    if args.prompt_ids is not None:
        words = args.prompt_ids.replace(",", " ").split()
        if not words:
            raise ValueError('prompt_ids is empty: give at least one token id, such as "1 2 3"')
        if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
            given = args.prompt_ids[:60]
            raise ValueError(f'prompt_ids {given!r} must be whole numbers, such as "1 2 3"')
        return [int(word) for word in words]
    text = read_text(args)
    if text is None:
        raise ValueError("no prompt: give --prompt, --prompt_file, --prompt_ids or --interactive")
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one character that is not a space")
    return text


def read_text(args: Namespace) -> str | None:
    """What --prompt or --prompt_file gives; None if neither does."""
    file = args.prompt_file
    if file is None:
        return sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"prompt file {file} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        failed = f"prompt file {file} cannot be read ({error.strerror})"
        raise ValueError(f"{failed}: check its name, or give --prompt") from None


def wants_chat(args: Namespace, tokenizer: Tokenizer | None) -> bool:
    """Whether the chat template is used: where there is one, unless told otherwise."""
    has = tokenizer is not None and tokenizer.has_chat_template
    if args.chat and not has:
        raise ValueError("--chat needs a chat template and the checkpoint has none: use --no_chat")
    if args.system is not None and (args.chat is False or not has):
        raise ValueError("--system needs a chat template, without --no_chat: put it in the prompt")
    return has if args.chat is None else args.chat


def opening(args: Namespace) -> list[dict]:
    """The messages that a conversation begins with."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def prompt_ids(args: Namespace, files: Files, prompt: str | list[int] | None) -> list[int] | None:
    """The ids of the prompt, the chat template applied; None when conversing."""
    if files.tokenizer is None and (args.stop or not isinstance(prompt, list)):
        raise ValueError(
            f"no tokenizer next to {args.checkpoint_path}, which text needs: copy tokenizer.json "
            "there, or give --prompt_ids without --stop"
        )
    chat = not isinstance(prompt, list) and wants_chat(args, files.tokenizer)
    for name, _ in args.template_option:
        if not (chat and files.tokenizer.takes_option(name)):
            raise ValueError(f"--template_option {name}: no template in use has it: leave it out")
    if prompt is None:
        return None
    if chat:
        prompt = [*opening(args), {"role": "user", "content": prompt}]
    return encode(files.tokenizer, prompt, dict(args.template_option))


def context_for(args: Namespace, files: Files, ids: list[int] | None) -> int:
    """The context for this run: by default enough for the prompt and its answer, as a smaller cache
    loads faster. Refuses a prompt that does not fit, before anything is loaded for it."""
    config, asked = files.config, args.max_seq_length
    if ids is None:
        return fit_context(asked, config)
    limit = config.max_seq_length
    context = fit_context(asked, config, max(2048, len(ids) + args.max_new_tokens))
    if len(ids) >= context:
        more = f", or raise --max_seq_length (this model allows {limit})" if context < limit else ""
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the context holds {context} with the answer: "
            f"shorten the prompt to {context - 1} or less{more}"
        )
    if max(ids, default=0) >= config.vocab_size:
        raise ValueError(f"prompt id {max(ids)} is unknown: give ids 0 to {config.vocab_size - 1}")
    return context


# ---------------------------------------------------------------- loading


def open_checkpoints(args: Namespace) -> Files:
    if args.checkpoint_path == DEMO and not DEMO.exists():
        raise ValueError(f"{DEMO} is not there yet: run `make demo`, or give --checkpoint_path")
    return shared(open_files(args.checkpoint_path, args.draft_checkpoint_path))


def prepare(args: Namespace, files: Files, options: Options) -> Engine:
    """Load and compile, and say what is run and which flags have no effect."""
    engine = load_files(files, options)
    card, sampling = engine.card, options.sampling
    engine.template_options = dict(args.template_option)
    note(
        f"{args.checkpoint_path.name}: {card['quantization'] or card['dtype']} on "
        f"{card['device']}, tree {card['tree']}, loaded in {card['load_s']:.1f} s"
    )
    if card["head"]:
        note(f"{card['head']}, weights in {card['head_quantization'] or card['dtype']}")
    elif files.head:
        note(f"note: --tree {card['tree']} takes no head: --draft_checkpoint_path has no effect")
    filtered = args.top_k > 0 or args.top_p < 1
    if sampling.greedy and (filtered or args.seed or args.num_samples > 1):
        note(
            f"note: temperature {args.temperature:g} is greedy: --top_k, --top_p and --seed have "
            "no effect and all samples are equal; give --temperature 1 to sample"
        )
    if args.highlight and engine.decoder.tree.nodes == 1:
        note("note: --highlight colours drafted tokens, and without a draft there are none")
    card["compile_s"] = 0.0
    if args.compile:
        note("compiling (kept in torch's cache for the next run) ...")
        card["compile_s"] = engine.warm_up(sampling)
        note(f"compiled in {card['compile_s']:.1f} s")
    return engine


# ---------------------------------------------------------------- the answers


def start(engine: Engine, args: Namespace, prompt: list, index: int = 0) -> TextGeneration:
    ends = {"stop": tuple(args.stop), "ignore_eos": args.ignore_eos}
    sampling = asdict(sampling_of(args, index))
    return engine.generate(prompt, max_new_tokens=args.max_new_tokens, **ends, **sampling)


def show(text: TextGeneration, highlight: bool) -> None:
    """Stream a text to standard output."""
    for piece, drafted in text.marked:
        sys.stdout.write(f"\033[32m{piece}\033[0m" if highlight and drafted and piece else piece)
        sys.stdout.flush()
    sys.stdout.write("\n" if text.stream else f"{' '.join(map(str, text.tokens))}\n")
    sys.stdout.flush()


def sample_all(engine: Engine, args: Namespace, ids: list[int], results: Results) -> int:
    """Generate --num_samples texts; returns the exit code."""
    plain = None
    if args.check:
        from talon.checking import check_sample

        plain = Decoder(engine.decoder.model, engine.decoder.max_seq_length, compile=args.compile)
    for index in range(args.num_samples):
        engine.decoder.forget()  # every sample is timed with its own prefill
        text = start(engine, args, ids, index)
        with profiled(args.profile if index == args.num_samples - 1 else None):
            show(text, args.highlight)
        results.add(text)
        if engine.decoder.tree.needs_head:
            warn_if_useless(results.samples[-1])
        if plain is not None:
            check = check_sample(plain, text)
            results.checks.append(check)
            note(f"check: {'identical to plain decoding' if check['identical'] else check}")
    return 0 if all(check["identical"] for check in results.checks) else 1


def warn_if_useless(record: dict) -> None:
    if record["rounds"] >= 32 and record["acceptance_length"] < 1.2:
        note(
            f"warning: acceptance length {record['acceptance_length']:.2f} over "
            f"{record['rounds']} rounds: the head hardly ever guesses right. Check that it was "
            "trained for this very target, that the chat template is on, and the head line above "
            "(features, norms, RoPE base)"
        )


def converse(engine: Engine, args: Namespace, results: Results) -> int:
    """Turns from standard input until its end; refused lines are forgotten. The exit code."""
    from talon.conversation import Conversation

    chat = wants_chat(args, engine.tokenizer)
    conversation = Conversation(engine, chat, opening(args), args.max_new_tokens)
    code = 0
    note("type a line and press enter; end of file or Ctrl-C leaves")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return code
        if not line.strip():
            continue
        try:
            text = start(engine, args, conversation.prompt(line))
        except ValueError as error:
            note(f"error: {error}")
            code = 2
            continue
        show(text, args.highlight)
        if conversation.add(line, text):
            note("note: the context is full: the oldest turns fell away")
        results.add(text)


@contextmanager
def profiled(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    whole = Path(path)
    partial = whole.with_name(f".{os.getpid()}.{whole.name}")  # the same suffix: .gz would compress
    try:
        profile.export_chrome_trace(str(partial))
        os.replace(partial, whole)
    finally:
        partial.unlink(missing_ok=True)
    note(f"trace written to {path}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_args(args)
    tuning = {"tune": "measure", "sampling": sampling_of(args), "keep_head": args.keep_head}
    options = read_options(args.tree, args.device, args.dtype, compile=args.compile, **tuning)
    prompt = read_prompt(args)
    files = open_checkpoints(args)
    if args.retune:
        from talon.tuning.choice import forget_choices  # as in talon/text.py: seldom needed

        forget_choices(files)
    ids = prompt_ids(args, files, prompt)
    context = context_for(args, files, ids)
    engine = prepare(args, files, replace(options, max_seq_length=context))
    compiled, results = compilations(), Results()
    try:
        if ids is None:
            code = converse(engine, args, results)
        else:
            code = sample_all(engine, args, ids, results)
    except KeyboardInterrupt:
        if ids is not None:
            raise
        code = 130  # the usual way to leave a conversation: its finished turns are reported
        print(file=sys.stderr)
    except BrokenPipeError:
        if args.json is None:
            raise
        raise ValueError("standard output was closed early: --json was not written") from None
    if args.json is not None:
        argv = argv if argv is not None else sys.argv[1:]
        write_json(args.json, results.to_json(engine, argv, compilations() - compiled))
    return code
