"""python -m evaluation.inference_recycling: the command line that Token Recycling's and
Spec-Bench's users know.

It runs one job like `evaluation.run`. The same command resumes an interrupted answer file; one with
other settings is refused. As in theirs, prompts are fschat's vicuna_v1.1 for every model, unless
--template names another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.errors import Parser
from model.files import ROOT, local_path
from model.prompts import VICUNA

from .configuration.config import checked_config
from .configuration.jobs import compose, quoted
from .errors import user_errors
from .running.scheduling import Job, run_jobs


def main() -> None:
    parser = Parser(prog="python -m evaluation.inference_recycling", description=__doc__)
    flag = parser.add_argument
    flag(
        "--model-path",
        dest="model.path",
        default="data/embedded",
        help="folder or hub name (default: %(default)s)",
    )
    flag(
        "--model-id", dest="model.name", help="name in the records (default: the path's last part)"
    )
    flag(
        "--bench-name",
        dest="bench.name",
        default="sample",
        help="of configs/bench, or any with --question-file",
    )
    flag("--question-file", dest="bench.path", help="another file in Spec-Bench's format")
    flag("--question-begin", dest="bench.begin", type=int, help="first question, counted from 0")
    flag("--question-end", dest="bench.end", type=int, help="one past the last question")
    flag("--answer-file", help="default: data/BENCH/model_answer/MODEL_ID.jsonl")
    flag("--max-new-tokens", dest="max_new_tokens", type=int, default=1024)
    flag("--num-choices", dest="num_choices", type=int, default=1)
    template_help = (
        "of prompts: one of fschat's, chat: the tokenizer's own, or raw:"
        " none (default: %(default)s)"
    )
    flag("--template", dest="model.template", default=VICUNA, help=template_help)
    flag("--dtype", dest="model.dtype", default="auto", help="auto, float32, float16, bfloat16")
    flag(
        "--output-id-topk",
        dest="method.k",
        type=int,
        default=8,
        help="candidates kept per token (k)",
    )
    tree_help = "template, or a YAML file of rank paths"
    flag("--tree-version", "--tree_version", dest="tree", default="2.2.2", help=tree_help)
    flag("--temperature", dest="sampling.temperature", type=float, default=0.0, help="0: greedy")
    flag("--start", default="hot", help="hot (as published), cold, or the file of a saved state")
    with user_errors():
        infer(vars(parser.parse_args()))


def infer(settings: dict[str, Any]) -> None:
    answer_file = settings.pop("answer_file")
    path = settings["model.path"]
    bench = settings["bench.name"]
    model = settings["model.name"] = settings["model.name"] or Path(path).name
    answer_file = local_path(
        answer_file or ROOT / "data" / bench / "model_answer" / f"{model}.jsonl"
    )
    settings |= {
        "model": "embedded" if path == "data/embedded" else "path",
        "run_dir": f"{answer_file}.run",
    }

    if questions := settings.pop("bench.path"):
        settings |= {"bench": "file", "bench.path": str(local_path(questions).resolve())}
    else:
        settings["bench"] = bench

    if settings["tree"].endswith((".yaml", ".yml")):
        settings |= {"tree": "file", "tree.path": settings["tree"]}
    print(f"prompts: template {settings['model.template']} (--template names another)")
    (job,) = compose([f"{key}={quoted(value)}" for key, value in settings.items()]).jobs
    run_jobs([Job(checked_config(job.config))], answer_file=answer_file)
    print(f"answers: {answer_file}")


if __name__ == "__main__":
    main()
