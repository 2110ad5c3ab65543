"""token-recycling chat MODEL, token-recycling generate MODEL: in the terminal, without the harness."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .chat import Chat, legend, prompt_of, talk, value_of
from .decoder import Decoder
from .decoding.sampling import Sampling
from .errors import UserError
from .methods import DEFAULT, METHODS
from .terminal import one_line, visible


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
