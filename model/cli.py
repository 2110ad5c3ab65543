"""The command `token-recycling`, without the harness."""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any, TextIO

from . import __version__
from .decoder import Answer, Decoder, pieces, seeded
from .engine import Generation, Sampling, StepRecord
from .engine.contract.sizing import steps_in_words
from .errors import Parser, UserError, user_errors, whole_characters
from .files import local_path
from .methods import DEFAULT, METHODS, make_method
from .prompts import RAW
from .tuning import choose_threads
from .weights.linear_choice import LINEAR

# ANSI colours of a step's text for 1, 2, 3, 4, and 5 or more tokens: default, cyan, green, yellow,
# magenta
COLOURS = ("39", "36", "32", "33", "35")
HELP = """/method NAME [KEY=VALUE ...]  another method, e.g. /method dynamic nodes=24, /method recycling tree=best:24
/reset                        forget the chat and the method's state
/help, /quit                  Ctrl-C stops an answer, Ctrl-D ends the chat"""  # noqa: E501
# Decoder arguments that are not method settings; the command has options for some of them
NO_SETTINGS = {
    *inspect.signature(Decoder).parameters,
    *inspect.signature(Decoder.from_pretrained).parameters,
}


class Chat:
    """Reads lines and writes answers.

    Args:
        colours: colour each step's text by its number of tokens, and print MAT and speed.
    """

    def __init__(
        self,
        decoder: Decoder,
        out: TextIO = sys.stdout,
        *,
        colours: bool,
        sampling: Sampling,
        **limits: Any,
    ) -> None:
        self.decoder = decoder
        self.out = out
        self.colours = colours
        self.sampling = sampling
        self.limits = limits
        self.turns: list[dict[str, str]] = []

    def say(self, line: str) -> bool:
        """Answer a line or run a command; return False if it ends the chat."""
        if line.strip() == "/quit":
            return False
        try:
            if line.startswith("/"):
                name, *arguments = line[1:].split() or [""]
                self._note(self._command(name, arguments))
            elif line.strip():
                self.turns.append({"role": "user", "content": line})
                self._answer()
        except UserError as error:
            self._note(str(error))
        finally:
            # without an answer, drop the question
            if self.turns and self.turns[-1]["role"] == "user":
                self.turns.pop()
        return True

    def _command(self, name: str, arguments: list[str]) -> str:
        decoder = self.decoder
        if name == "method" and arguments:
            settings = settings_of(arguments[1:], "/method")
            decoder.method = make_method(arguments[0], decoder.target, eos=decoder.eos, **settings)
            return f"method {' '.join(arguments)}"
        if name == "reset":
            self.turns.clear()
            decoder.reset()
            return "forgotten"
        if name == "help":
            lines = "\n".join(f"{key}: {value}" for key, value in decoder.settings.items())
            return f"{HELP}\nmethods: {', '.join(METHODS)}\n{lines}"

        raise UserError(f"/{name}: no such command, or its arguments do not fit; there are\n{HELP}")

    def _answer(self) -> None:
        decoder = self.decoder
        text = ""
        prompt = decoder.ids_of(self.turns)
        if len(prompt) >= decoder.target.context and len(self.turns) > 1:
            raise UserError(
                f"the chat has {len(prompt)} tokens, more than the context takes; /reset forgets it"
            )

        sampling = seeded(self.sampling, len(self.turns) // 2)
        steps = decoder.stream(prompt, sampling=sampling, **self.limits)
        ended: Generation | None = None  # None if Ctrl-C stopped the answer

        def to_the_end() -> Iterator[StepRecord]:
            nonlocal ended
            ended = yield from steps

        with closing(steps), suppress(KeyboardInterrupt):
            for piece, length in pieces(to_the_end(), decoder.text_of, decoder.probes):
                text += piece
                if self.colours:
                    colour = COLOURS[min(length, len(COLOURS)) - 1]
                    piece = f"\033[{colour}m{piece}\033[0m"
                self._put(piece)

        self._put("\n")
        self.turns.append({"role": "assistant", "content": text})
        if self.colours and ended is not None and len(ended.accept_lengths) > 1:
            lengths = ended.accept_lengths
            setup = f"; {ended.setup_s:.1f} s of setup" if ended.setup_s else ""
            speed = (
                f"{sum(lengths[1:]) / ended.decode_s:.1f} tokens/s; first token after"
                f" {ended.prefill_s:.1f} s"
            )
            self._note(f"MAT {sum(lengths) / len(lengths):.2f}, {speed}{setup}")

    def _put(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _note(self, text: str) -> None:
        self._put(f"\033[2m{text}\033[0m\n" if self.colours else f"{text}\n")


def talk(chat: Chat) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 - lines can be edited, and the arrows bring earlier ones back
    with suppress(EOFError):
        while True:
            try:
                if not chat.say(input("> " if terminal else "").removeprefix("\ufeff")):
                    return
            except KeyboardInterrupt:  # discards the line
                if not terminal:
                    raise
                print()


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def settings_of(texts: Iterable[str], command: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{command} {text}: must be KEY=VALUE")
        if key in NO_SETTINGS:
            raise UserError(
                f"{command} {text}: {key} is no setting of a method; --help lists the options"
            )
        settings[key] = value_of(value)
    return settings


def parser() -> Parser:
    top = Parser(
        prog="token-recycling", description="Lossless speculative decoding without training."
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    for name, help in (
        ("chat", "talk to a model"),
        ("generate", "answer prompts as text or JSONL"),
    ):
        command = commands.add_parser(name, help=help)
        option = command.add_argument
        option("model", help="a folder, or a name on the hub")
        option("--method", default=DEFAULT, help=f"one of {', '.join(METHODS)}")
        option(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a setting of the method",
        )
        option("--start", default="hot", help="hot, cold, or the file of a saved state")
        option("--context", type=int, help="tokens of prompt and answer; default: at most 4096")
        option("--max-new-tokens", type=int, default=512)
        option("--temperature", type=float, default=0.0)
        option("--seed", type=int, default=0)
        option("--stop", action="append", metavar="TEXT", help="end an answer at this text")
        option(
            "--chat-template-kwargs",
            type=value_of,
            metavar="JSON",
            help="such as '{\"enable_thinking\": false}'",
        )
        option("--dtype", default="auto", help="auto, float32, float16, bfloat16")
        option("--device", help="default: CUDA if available")
        option(
            "--threads", type=int, help="on a CPU; default: OMP_NUM_THREADS, else the free cores"
        )
        option("--execution", default="auto", help="auto, eager, graph")
        option("--linear", default="auto", help=", ".join(LINEAR))
        option("--quantize", help="weights of int8 or int4, by torchao")
        option("--trust-remote-code", action="store_true")

    source = command.add_mutually_exclusive_group(required=True)  # `command` is now `generate`
    source.add_argument("--prompt")
    source.add_argument(
        "--file", type=local_path, help="one prompt per line; - reads standard input"
    )
    option("--batch", type=int, default=1, help="so many prompts are decoded together")
    option("--raw", action="store_true", help="use the prompt without a chat template")
    option("--quiet", action="store_true", help="leave out the last line, on standard error")
    option("--jsonl", action="store_true", help="an object per prompt: text, ids, accepted lengths")
    return top


def main(arguments: list[str] | None = None) -> None:
    with user_errors("the answers above are complete"):
        run(parser().parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    from transformers.utils import logging

    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    prompts = prompts_of(options) if options.command == "generate" else []
    logging.set_verbosity_error()  # notes and bars would mix with the answer
    logging.disable_progress_bar()
    if notice := choose_threads(options.threads):
        print(notice, file=sys.stderr)

    gc.freeze()  # imported modules stay alive; scanning them for garbage took 0.3 s of loading
    names = NO_SETTINGS - {"model"}
    arguments = {name: value for name, value in vars(options).items() if name in names}
    decoder = Decoder.from_pretrained(
        options.model, **arguments, **settings_of(options.set, "--set")
    )
    limits = dict(max_new_tokens=options.max_new_tokens, sampling=sampling, stop=options.stop)
    if options.command == "generate":
        return generate(decoder, prompts, options, limits)

    chat = Chat(decoder, colours=sys.stdout.isatty(), **limits)
    if chat.colours:
        legend = " ".join(f"\033[{colour}m{n}\033[0m" for n, colour in enumerate(COLOURS, 1))
        print(f"Colour: tokens that a step added, {legend} and more. /help lists the commands.")

    talk(chat)


def generate(
    decoder: Decoder, prompts: list[str], options: argparse.Namespace, limits: dict[str, Any]
) -> None:
    if not options.raw and decoder.template == RAW:
        options.raw = True
        print(
            f"{decoder.target.name}: has no chat template; each prompt is continued as it is",
            file=sys.stderr,
        )

    inputs = (
        prompts if options.raw else [[{"role": "user", "content": prompt}] for prompt in prompts]
    )
    start = time.perf_counter()
    answers = list[Answer]()
    for answer in decoder.answers(inputs, batch=options.batch, **limits):
        text = answer.text
        if options.jsonl:
            prompt = prompts[len(answers)]
            # as the template got it
            chat = {} if options.raw else {"messages": inputs[len(answers)]}
            row = {"prompt": prompt, **chat, **asdict(answer)}
            text = json.dumps(row)
        print(text, flush=True)
        answers.append(answer)

    if not options.quiet:
        print(
            summary(decoder, answers, time.perf_counter() - start, options.batch), file=sys.stderr
        )


def summary(decoder: Decoder, answers: list[Answer], seconds: float, batch: int = 1) -> str:
    tokens = sum(len(a.ids) for a in answers)
    steps = sum(len(a.accept_lengths) for a in answers)
    setup = sum(answer.setup_s for answer in answers)
    line = (
        f"{tokens} tokens in {steps} steps: {tokens / steps:.2f} a step,"
        f" {tokens / (seconds - setup):.1f} tokens/s"
    )
    line += f" and {setup:.1f} s of setup" if setup else ""
    # a batch's step times depend on its width
    described = decoder.method.describe() if batch == 1 else {}
    if gain := described.get("predicted_speedup"):
        line += (
            f"; {'drafting paid' if gain > 1 else steps_in_words(described)}: about {gain:.2f}"
            " times plain decoding"
        )

    return line


def prompts_of(options: argparse.Namespace) -> list[str]:
    if options.prompt is not None:
        return [whole_characters(options.prompt)]  # its bytes may be no UTF-8

    try:
        text = (
            sys.stdin.buffer.read() if str(options.file) == "-" else options.file.read_bytes()
        ).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {options.file}: cannot be read ({error})") from None

    # U+2028, form feeds and others are text
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--file {options.file}: holds no prompt")
    return prompts


if __name__ == "__main__":
    main()
