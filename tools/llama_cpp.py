"""python -m tools.llama_cpp --model FILE.gguf: this engine and llama.cpp on one file, prompt by prompt in turns.

Only this tool needs llama-cpp-python (pip install llama-cpp-python compiles it, 10 to 20 minutes on 2 cores). llama.cpp
multiplies by the quantised weights, this engine by the de-quantised ones in float32 or bfloat16. So the texts differ:
compare tokens/s, not MAT.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evaluation.configuration.methods import Method, build_method
from evaluation.errors import one_line, user_errors
from evaluation.loading import gguf
from evaluation.loading.bench import prompt_ids
from evaluation.loading.locks import exclusive
from evaluation.loading.models import LoadedModel, load_model
from evaluation.loading.settings import ModelSettings
from evaluation.records.provenance import describe_device
from evaluation.records.questions import read_questions
from evaluation.running.answering import warm_up_prompt
from model.errors import UserError
from model.files import ROOT, located, write_json

Answer = Callable[[list[int]], int]  # decodes a prompt and returns the number of new tokens
NO_TREE = {"name": "2.2.2", "nodes": None, "depth": None, "branching": None, "path": None}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.llama_cpp", description=__doc__)
    parser.add_argument("--model", default="data/smollm2-135m", help="a GGUF file (default: the one of smollm2-135m)")
    parser.add_argument(
        "--questions", type=Path, default=ROOT / "data/sample/question.jsonl", help="Spec-Bench's format"
    )
    parser.add_argument("--prompts", type=int, default=12, help="first turns, spread over the file (default 12)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", default="4,8,24", help="of spine's drafts (default 4,8,24)")
    parser.add_argument("--dtype", default="float32", help="this engine's: float32, bfloat16")
    parser.add_argument("--save", type=Path, help="also write the figures here, as JSON")
    with user_errors():
        arguments = parser.parse_args()
        if min(arguments.prompts, arguments.repeats, arguments.max_new_tokens) < 1:
            raise UserError("--prompts, --repeats and --max-new-tokens must be at least 1")
        if not all(word.isdigit() for word in arguments.nodes.split(",")):
            raise UserError(f"--nodes {arguments.nodes}: must be numbers with commas between, as 4,8,24")
        try:
            llama_cpp = importlib.import_module("llama_cpp")
        except ImportError:
            raise UserError("llama-cpp-python is not installed here: pip install llama-cpp-python") from None
        file = located(arguments.model)
        if not gguf.is_gguf(file):
            raise UserError(f"--model {arguments.model}: must be a GGUF file, as llama.cpp reads nothing else")
        file = gguf.gguf_file(file)
        settings = ModelSettings("llama_cpp", str(file), dtype=arguments.dtype, device="cpu", template="chat")
        with exclusive(settings) as settings:
            compare_engines(load_model(settings), llama_cpp, file, arguments)


def compare_engines(loaded: LoadedModel, llama_cpp: Any, file: Path, arguments: argparse.Namespace) -> None:
    """Time all decoders in turns, prompt by prompt, and print medians over the repeats."""
    questions = read_questions(arguments.questions)
    most = min(arguments.prompts, len(questions))
    turns = [questions[i * len(questions) // most].turns[0] for i in range(most)]
    prompts = [prompt_ids(loaded.template, loaded.tokenizer, [turn], []) for turn in turns]
    nodes = [int(word) for word in arguments.nodes.split(",")]
    methods = engine_methods(loaded, nodes)
    decoders: dict[str, Answer] = {
        name: engine_decoder(method, arguments.max_new_tokens) for name, method in methods.items()
    }
    decoders |= llama_decoders(llama_cpp, str(file), loaded, arguments.max_new_tokens)
    for answer in decoders.values():
        answer(warm_up_prompt(loaded))
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(arguments.repeats):
        for method in methods.values():
            method.prepare()  # else it would draft from its answers of the repeat before
        tokens, seconds = dict.fromkeys(decoders, 0), dict.fromkeys(decoders, 0.0)
        for prompt in prompts:
            for name, answer in decoders.items():
                start = time.perf_counter()
                tokens[name] += answer(prompt)
                seconds[name] += time.perf_counter() - start
        for name in decoders:
            speeds[name].append(tokens[name] / seconds[name])
    base = speeds["vanilla"]
    print(
        f"{file.name}, {most} prompts, {arguments.max_new_tokens} new tokens at most, "
        f"{describe_device(torch.device('cpu'))}; tokens/s, prompt included, "
        f"median of {arguments.repeats} (min - max):"
    )
    for name, values in speeds.items():
        over = statistics.median(a / b for a, b in zip(values, base, strict=True))
        spread = f"({min(values):.1f} - {max(values):.1f})"
        print(f"  {name:32} {statistics.median(values):7.1f}  {spread:16} {over:.2f} x vanilla")
    if arguments.save:
        write_json(arguments.save, speeds)
    print(json.dumps(speeds))


def engine_methods(loaded: LoadedModel, nodes: list[int]) -> dict[str, Method]:
    """Build hf and, on this engine, vanilla and spine with state kept between prompts."""
    method_settings: dict[str, dict[str, Any]] = {
        "hf": {"name": "hf", "drafter": None},
        "vanilla": {"name": "vanilla", "drafter": "model.vanilla.Vanilla"},
    }
    for n in nodes:
        method_settings[f"spine, {n} nodes"] = {"name": "spine", "drafter": "model.copying.spine.Spine", "nodes": n}
    return {name: build_method(loaded, settings, NO_TREE, "hot") for name, settings in method_settings.items()}


def engine_decoder(method: Method, most: int) -> Answer:
    return lambda prompt: len(method.answer(prompt, most).tokens)


def llama_decoders(llama_cpp: Any, file: str, loaded: LoadedModel, most: int) -> dict[str, Answer]:
    """Build llama.cpp's greedy decoders: plain, and with its prompt look-up of 10 draft tokens, as documented."""
    look_up = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    threads = torch.get_num_threads()
    common = {"n_ctx": loaded.target.context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}

    def decoder(draft: Any) -> Answer:
        try:
            llama = llama_cpp.Llama(model_path=file, draft_model=draft, **common)
        except ValueError as error:
            raise UserError(f"{file}: llama.cpp cannot read it ({one_line(error)[:120]})") from None

        def answer(prompt: list[int]) -> int:
            llama.reset()  # else it would reuse the cached prompt
            count = 0
            for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
                count += 1
                if token in loaded.eos or count == most:
                    break
            return count

        return answer

    return {
        "llama.cpp": decoder(None),
        "llama.cpp, prompt look-up": decoder(look_up(num_pred_tokens=10)),
    }


if __name__ == "__main__":
    main()
