"""token-recycling chat MODEL, token-recycling generate MODEL: in the terminal, without the harness."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from .decoder import Decoder, pieces
from .engine import StepRecord, generate
from .engine.sampling import Sampling
from .errors import UserError, one_line, visible
from .methods import DEFAULT, METHODS, make_method
from .methods.vanilla import Vanilla

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Of the text of a step of 1, 2, 3, 4, and 5 or more tokens: default to magenta
COLOURS = ("39", "36", "32", "33", "35")
BASELINE = 12  # tokens of plain decoding, timed for the speedup
HELP = """/method NAME [KEY=VALUE ...]  another method, e.g. /method dynamic nodes=24
/tree NAME or best:N          recycling with this tree, e.g. /tree best:24
/temperature T                sampling temperature; 0 is greedy
/reset                        forget the chat and the method's state
/help, /quit                  Ctrl-C stops an answer, Ctrl-D ends the chat"""
COMMANDS = ("method", "tree", "temperature", "reset", "help", "quit")


class Chat:
    """One chat, from lines in to text out; control characters in the model's text are printed as escapes.

    Args:
        colours: colour the text of each step by its number of tokens, and print MAT and speed below each answer.
    """

    def __init__(
        self, decoder: Decoder, out: TextIO = sys.stdout, *, colours: bool, max_new_tokens: int, sampling: Sampling
    ) -> None:
        self.decoder, self.out, self.colours = decoder, out, colours
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.turns: list[dict[str, str]] = []
        self._plain: float | None = None  # tokens a second of plain decoding

    def say(self, line: str) -> bool:
        """Answer a line or run a command; return False if it ends the chat."""
        if line.startswith("/"):
            name, *rest = line[1:].split() or [""]
            if name == "quit":
                return False
            try:
                self._note(self._command(name, rest))
            except UserError as error:
                self._note(str(error))
        elif line.strip():
            self.turns.append({"role": "user", "content": line})
            try:
                self._answer()
            except UserError as error:  # a chat that is too long, as a rule
                self._note(str(error))
            finally:
                if self.turns and self.turns[-1]["role"] == "user":  # there is no answer, so the question goes, too
                    self.turns.pop()
        return True

    def _command(self, name: str, rest: list[str]) -> str:
        """Run a command and return what to print. Raises UserError if it cannot be run."""
        decoder = self.decoder
        if name == "reset":
            self.turns.clear()
            decoder.method.reset()
            return "forgotten"
        if name == "temperature" and len(rest) == 1:
            self.sampling = replace(self.sampling, temperature=number(rest[0]))
            return f"temperature {self.sampling.temperature:g}"
        if name == "method" and rest and all("=" in setting for setting in rest[1:]):
            settings = {key: value_of(value) for key, _, value in (setting.partition("=") for setting in rest[1:])}
            decoder.method = make_method(rest[0], decoder.target, eos=decoder.eos, **settings)
            return f"method {rest[0]}"
        if name == "tree" and len(rest) == 1:
            decoder.method = make_method("recycling", decoder.target, eos=decoder.eos, tree=rest[0])
            return f"recycling with {rest[0]}"
        if name == "help":
            chosen = "\n".join(f"{key}: {value}" for key, value in self.decoder.settings.items())
            return f"{HELP}\nmethods: {', '.join(METHODS)}\n{chosen}"
        wrong = "these arguments do not fit" if name in COMMANDS else "no such command"
        raise UserError(f"/{name}: {wrong}; there are\n{HELP}")

    def _answer(self) -> None:
        """Stream an answer; Ctrl-C ends it, and the text so far stays in the chat."""
        decoder = self.decoder
        prompt = prompt_of(decoder, self.turns)
        if self.colours and self._plain is None:
            self._plain = plain_speed(decoder, prompt)
        seed = self.sampling.seed + len(self.turns)
        steps = decoder.stream(prompt, max_new_tokens=self.max_new_tokens, sampling=replace(self.sampling, seed=seed))
        text, step_count, tokens, decoded, start = "", 0, 0, 0, time.perf_counter()
        first = start

        def counted(record: StepRecord) -> StepRecord:
            nonlocal step_count, tokens, decoded, first
            step_count, tokens = step_count + 1, tokens + record.accepted
            if step_count == 1:  # its time is the prefill's
                first = time.perf_counter()
            else:
                decoded += record.accepted
                self._show(f"\033]2;{self._figures(tokens, step_count, decoded, time.perf_counter() - first)}\007")
            return record

        self._show("\033[22;2t")  # keep the terminal's own title
        with closing(steps), suppress(KeyboardInterrupt):
            for piece, length in pieces(map(counted, steps), decoder.text_of):
                text += piece
                shown = visible(piece)
                self._put(f"\033[{COLOURS[min(length, len(COLOURS)) - 1]}m{shown}\033[0m" if self.colours else shown)
        seconds = time.perf_counter() - first
        self._put("\n")
        self._show("\033[23;2t")
        self.turns.append({"role": "assistant", "content": text})
        if self.colours and step_count > 1:
            self._note(
                f"{self._figures(tokens, step_count, decoded, seconds)}; first token after {first - start:.1f} s"
            )

    def _figures(self, tokens: int, steps: int, decoded: int, seconds: float) -> str:
        """Word the MAT of all steps, and the speed of all but the first."""
        speed = decoded / seconds
        over = f", {speed / self._plain:.2f} x plain" if self._plain else ""
        return f"MAT {tokens / steps:.2f}, {speed:.1f} tokens/s{over}"

    def _show(self, control: str) -> None:
        """Send a control sequence, such as the window's title, to a terminal only."""
        if self.colours:
            self._put(control)

    def _put(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _note(self, text: str) -> None:
        shown = visible(text)  # an error may quote what a model's files say
        self._put(f"\033[2m{shown}\033[0m\n" if self.colours else f"{shown}\n")


def plain_speed(decoder: Decoder, prompt: list[int]) -> float | None:
    """Measure plain greedy decoding after this prompt, in tokens per second; None if the answer is too short."""
    target, execution = decoder.target, decoder.execution.name
    for _ in range(2):  # the first is the warm-up: on the toy model it was 16 to 24 % slower than later ones
        out = generate(target, Vanilla(target.device), prompt, max_new_tokens=BASELINE + 1, execution=execution)
    return (len(out.tokens) - 1) / out.decode_s if len(out.tokens) > 1 else None


def prompt_of(decoder: Decoder, turns: list[dict[str, str]]) -> list[int]:
    """Return a chat's ids by the tokenizer's template, or by Vicuna's if it has none."""
    if decoder.tokenizer is not None and decoder.tokenizer.chat_template is not None:
        return decoder.ids_of(turns)
    names = {"user": "USER", "assistant": "ASSISTANT"}
    ends = {"user": " ", "assistant": "</s>"}
    said = "".join(f"{names[turn['role']]}: {turn['content']}{ends[turn['role']]}" for turn in turns)
    return decoder.ids_of(f"{VICUNA} {said}ASSISTANT:")


def legend() -> str:
    """Return the colours of a step's text, by its number of tokens."""
    counts = [*map(str, range(1, len(COLOURS))), f"{len(COLOURS)}+"]
    return " ".join(f"\033[{colour}m{count}\033[0m" for colour, count in zip(COLOURS, counts, strict=True))


def talk(chat: Chat, read: Callable[[str], str], asks: str) -> None:
    """Read lines until Ctrl-D or /quit; Ctrl-C at the prompt discards the line."""
    while True:
        try:
            if not chat.say(read(asks)):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            chat._put("\n")


def value_of(text: str) -> bool | int | float | str:
    """Read a setting's value: true, false, a number, or text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def number(text: str) -> float:
    """Read a number. Raises UserError if it is none."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text}: must be a number") from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="token-recycling", description="Lossless speculative decoding without training.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, what in (("chat", "talk to a model"), ("generate", "answer prompts as text or JSONL")):
        command = commands.add_parser(name, help=what)
        command.add_argument("model", help="a folder, or a name on the hub")
        command.add_argument("--method", default=DEFAULT, help=f"one of {', '.join(METHODS)}")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the method")
        command.add_argument("--max-new-tokens", type=int, default=512)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16")
        command.add_argument("--device", help="default: CUDA if available")
        command.add_argument("--execution", default="auto", help="auto, eager, graph")
        command.add_argument("--linear", default="auto", help="auto, onednn, fused, torch")
        command.add_argument("--quantize", help="weights of int8 or int4, by torchao")
        command.add_argument("--trust-remote-code", action="store_true")
        if name == "generate":
            given = command.add_mutually_exclusive_group(required=True)
            given.add_argument("--prompt")
            given.add_argument("--file", type=Path, help="one prompt per line; - reads standard input")
            command.add_argument("--raw", action="store_true", help="use the prompt without a chat template")
            command.add_argument(
                "--jsonl", action="store_true", help="an object per prompt: text, ids, accepted lengths"
            )
    return top


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    try:
        run(given)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read has gone
        sys.stderr.close()
        sys.exit(1)


def run(given: argparse.Namespace) -> None:
    """Load the model and run the command. Raises UserError for a user's mistakes."""
    sampling = Sampling(temperature=given.temperature, seed=given.seed)
    prompts = prompts_of(given) if given.command == "generate" else []
    quiet()
    decoder = Decoder.from_pretrained(
        given.model,
        dtype=given.dtype,
        device=given.device,
        trust_remote_code=given.trust_remote_code,
        quantize=given.quantize,
        method=given.method,
        execution=given.execution,
        linear=given.linear,
        **settings_of(given.set),
    )
    if given.command == "generate":
        for number, prompt in enumerate(prompts):  # each with its own noise
            answer(decoder, prompt, given, replace(sampling, seed=sampling.seed + number))
        return
    shown = sys.stdout.isatty()
    chat = Chat(decoder, colours=shown, max_new_tokens=given.max_new_tokens, sampling=sampling)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if not chat.say(line.rstrip("\n")):
                return
        return
    import readline  # noqa: F401 - lines can be edited, and the arrows bring earlier ones back

    if shown:
        print(f"Colour: tokens that a step added, {legend()}. /help lists the commands.")
    talk(chat, input, "> ")


def answer(decoder: Decoder, prompt: str, given: argparse.Namespace, sampling: Sampling) -> None:
    """Print the answer to a prompt: exact, except that a terminal gets control characters as escapes."""
    ids = decoder.ids_of(prompt) if given.raw else prompt_of(decoder, [{"role": "user", "content": prompt}])
    reply = decoder.generate(ids, max_new_tokens=given.max_new_tokens, sampling=sampling)
    if given.jsonl:
        row = {"prompt": prompt, "text": reply.text, "ids": reply.ids, "accept_lengths": reply.accept_lengths}
        print(visible(json.dumps(row | {"stop": reply.stop}, ensure_ascii=False)), flush=True)
    else:  # exact in a file or a pipe; a terminal would obey control characters
        print(visible(reply.text) if sys.stdout.isatty() else reply.text, flush=True)


def prompts_of(given: argparse.Namespace) -> list[str]:
    """Return the prompts. Raises UserError if the file cannot be read or holds none."""
    if given.prompt is not None:
        return [given.prompt]
    try:
        text = (sys.stdin.buffer.read() if str(given.file) == "-" else given.file.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {given.file}: cannot be read ({error})") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]  # U+2028, form feeds and others are text
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--file {given.file}: holds no prompt")
    return prompts


def settings_of(texts: list[str]) -> dict[str, Any]:
    """Read settings of the form KEY=VALUE. Raises UserError for anything else."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: must be KEY=VALUE")
        settings[key] = value_of(value)
    return settings


def quiet() -> None:
    """Silence transformers' progress bars and notes, which would mix with the answer."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
