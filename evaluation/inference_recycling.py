"""python -m evaluation.inference_recycling: the command line that Token Recycling's and Spec-Bench's users know.

It calls `evaluation.run` and writes its records to --answer-file. The same command resumes an interrupted file; other
settings are refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model.files import ROOT

from .configuration.config import checked_config
from .configuration.jobs import compose, quoted
from .errors import user_errors
from .running.scheduling import Job, run_jobs


def parser() -> argparse.ArgumentParser:
    """Return a parser with the flags of those command lines."""
    flags = argparse.ArgumentParser(prog="python -m evaluation.inference_recycling", description=__doc__)
    flags.add_argument("--model-path", default="data/embedded", help="folder or hub name (default: the embedded model)")
    flags.add_argument("--model-id", default=None, help="name in the records (default: the path's last part)")
    flags.add_argument("--bench-name", default="sample", help="one of configs/bench, or any with --question-file")
    flags.add_argument("--question-file", help="another file in Spec-Bench's format")
    flags.add_argument("--question-begin", type=int, help="first question, counted from 0")
    flags.add_argument("--question-end", type=int, help="one past the last question")
    flags.add_argument("--answer-file", help="default: data/BENCH/model_answer/MODEL_ID.jsonl")
    flags.add_argument("--max-new-tokens", type=int, default=1024)
    flags.add_argument("--num-choices", type=int, default=1)
    flags.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    flags.add_argument("--output-id-topk", type=int, default=8, help="candidates kept per token (k)")
    flags.add_argument(
        "--tree-version", "--tree_version", default="2.2.2", help="template, or a YAML file of rank paths"
    )
    flags.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    flags.add_argument("--start", default="hot", help="hot (as published), cold, or the file of a saved state")
    return flags


def main() -> None:
    """The command line."""
    arguments = parser().parse_args()
    with user_errors():
        infer(arguments)


def infer(arguments: argparse.Namespace) -> None:
    """Run what the flags say. Raises UserError for a wrong value."""
    bench, questions, template = arguments.bench_name, arguments.question_file, arguments.tree_version
    model_id = arguments.model_id or Path(arguments.model_path).name
    answer_file = Path(arguments.answer_file or ROOT / "data" / bench / "model_answer" / f"{model_id}.jsonl")
    is_file = template.endswith((".yaml", ".yml"))
    settings = {
        "model": "embedded" if arguments.model_path == "data/embedded" else "path",
        "model.path": arguments.model_path,
        "model.name": model_id,
        "model.dtype": arguments.dtype,
        "bench": bench if questions is None else "file",
        "bench.name": bench,
        "bench.begin": arguments.question_begin,
        "bench.end": arguments.question_end,
        "method": "recycling",
        "method.k": arguments.output_id_topk,
        "tree.name": "file" if is_file else template,
        "tree.path": template if is_file else None,
        "start": arguments.start,
        "sampling.temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "num_choices": arguments.num_choices,
        "run_dir": f"{answer_file}.run",
    }
    if questions is not None:
        settings["bench.path"] = str(Path(questions).resolve())
    (job,) = compose([f"{key}={quoted(value)}" for key, value in settings.items()]).jobs
    run_jobs([Job(checked_config(job.config))], answer_file=answer_file)
    print(f"answers: {answer_file}")


if __name__ == "__main__":
    main()
