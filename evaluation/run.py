"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from model.decoding import Generation
from model.errors import UserError

from . import distributed
from .answers import AnswerStore, Row
from .cli import Failure, fail, one_line, told, user_errors
from .conversation import answer_text, prompt_ids, template_hash
from .devices import devices_in_words, exclusive
from .methods import COLD, Method, build_method
from .metrics import measure
from .models import LoadedModel, ModelSettings, load_model
from .provenance import collect
from .questions import ROOT, Bench, Question, load_bench
from .step_times import warm_up_prompt


def run(cfg: DictConfig, answer_file: Path | None = None) -> Path:
    """One run: load, warm up, answer what is not answered yet, summarise. Returns the run's directory.

    Raises:
        UserError: whatever a user can mend.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    for key, least in (("max_new_tokens", 1), ("num_choices", 1)):
        if not isinstance(config[key], int) or config[key] < least:
            raise UserError(f"{key}={config[key]}: must be a whole number, at least {least}")
    model = ModelSettings(**config["model"])
    with exclusive(model):
        return _measure(config, model, answer_file)


def _measure(config: dict[str, Any], model: ModelSettings, answer_file: Path | None) -> Path:
    """The run, on devices that no other run uses meanwhile."""
    bench = load_bench(**config["bench"])
    loaded = load_model(model)
    loaded.target.execution = choose_execution(str(config["execution"]), loaded)
    method = build_method(loaded, config["method"], config["tree"], str(config["start"]))
    settings = run_settings(config, bench, method)
    given: str | None = config["run_dir"]
    folder = Path(given) if given else default_folder(config, settings, method)
    check_prompts(bench, loaded)
    store = distributed.open_store(folder, answer_file)
    with store.locked():
        extra = {
            "label": method.label,
            "device": devices_in_words(loaded),
            "execution_used": execution_used(method),
            "questions": len(bench.questions),
            "template_sha256": template_hash(loaded.template, loaded.tokenizer),
            "config": config,
        }
        done = store.begin(collect(settings, loaded.target.device, extra))
        pending = [q for q in bench.questions if q.question_id not in done]
        if pending:
            torch.manual_seed(config["seed"])
            warm_up(method)
            if done and method.start not in (None, COLD):
                method.drafter.load_state_dict(store.state_at(len(done)))  # type: ignore[union-attr]
            answer_all(pending, method, store, config, done)
        summarise(store, done, method)
    return folder


def run_settings(config: dict[str, Any], bench: Bench, method: Method) -> dict[str, Any]:
    """Everything that decides a run's answers and what it measures: its fingerprint."""
    loaded = method.loaded
    model = asdict(loaded.settings) | {
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "device": loaded.target.device.type,
        "template": loaded.template,
        "context": loaded.target.context,
        "processes": distributed.world_size(),
    }
    ids = [q.question_id for q in bench.questions]
    return {
        "model": model,
        "bench": {"name": bench.name, "sha256": bench.sha256, "ids_sha256": _sha256(ids), "questions": len(ids)},
        "method": method.settings,
        "execution": loaded.target.execution,
        "max_new_tokens": config["max_new_tokens"],
        "num_choices": config["num_choices"],
        "seed": config["seed"],
    }


def choose_execution(name: str, loaded: LoadedModel) -> str:
    """`auto` is eager: the one that needs no compiler and has been measured on every device this project ran on."""
    if name not in ("auto", "eager") and (distributed.world_size() > 1 or len(loaded.target.devices) > 1):
        raise UserError(f"execution={name}: a model on several devices takes eager only")
    return loaded.target.check_execution("eager" if name == "auto" else name)


def execution_used(method: Method) -> str:
    """What a run's steps really are: a drafter whose topology changes runs eagerly whatever is asked for."""
    asked = method.loaded.target.execution
    if method.drafter is None:
        return "transformers generate"
    return asked if asked == "eager" or method.drafter.tree is not None else f"eager ({asked} needs a fixed topology)"


def default_folder(config: dict[str, Any], settings: dict[str, Any], method: Method) -> Path:
    """A directory of its own for each configuration: readable, and told apart by the fingerprint."""
    parts = [settings["model"]["name"], settings["bench"]["name"], method.label, method.settings.get("tree", "")]
    words = "-".join(re.sub(r"[^\w.]+", "_", str(part)).strip("_") for part in parts if part)
    return Path(config["results_dir"]) / str(config["name"]) / "runs" / f"{words}-{_sha256(settings)[:8]}"


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def check_prompts(bench: Bench, loaded: LoadedModel) -> None:
    """Refuse now what would stop the run later: a first turn that leaves no room for an answer."""
    for question in bench.questions:
        length = len(prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], []))
        if length >= loaded.target.context:
            raise UserError(
                f"question {question.question_id}: its prompt of {length} tokens does not fit the context of "
                f"{loaded.target.context}; raise model.context or leave it out (bench.categories, bench.end)"
            )


def warm_up(method: Method) -> None:
    """Answer a held-out question, then forget it: allocation and first-call costs stay out of the timings."""
    method.answer(warm_up_prompt(method.loaded), 48)
    method.prepare()


def answer_all(
    pending: list[Question], method: Method, store: AnswerStore, config: dict[str, Any], done: dict[Any, Row]
) -> None:
    """Answer question after question, keeping each as soon as it is done; adds to `done`."""
    total = len(pending) + len(done)
    bar = {"desc": method.label, "unit": "question", "dynamic_ncols": True, "disable": distributed.rank() > 0}
    with tqdm(total=total, initial=len(done), **bar) as progress:
        for question in pending:
            row = answer_question(question, method, config)
            done[question.question_id] = row
            state = method.drafter.state_dict() if method.drafter and method.start not in (None, COLD) else {}
            store.append(row, state, len(done))
            figures = measure([row])
            progress.set_postfix(
                mat=f"{figures.mat:.2f}", tokens_per_s=f"{figures.tokens_per_second:.0f}", refresh=False
            )
            progress.update()


def answer_question(question: Question, method: Method, config: dict[str, Any]) -> Row:
    """All turns of a question, `num_choices` times, as a row in Spec-Bench's answer format."""
    return {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{method.loaded.settings.name}-{method.label}".replace(" ", "-"),
        "choices": [_converse(question, method, config, index) for index in range(config["num_choices"])],
        "tstamp": time.time(),
    }


def _converse(question: Question, method: Method, config: dict[str, Any], index: int) -> Row:
    loaded, answers = method.loaded, list[str]()
    generations: list[Generation] = []
    for turn in range(len(question.turns)):
        prompt = prompt_ids(loaded.template, loaded.tokenizer, list(question.turns[: turn + 1]), answers)
        if len(prompt) < loaded.target.context:
            generation = method.answer(prompt, config["max_new_tokens"])
        else:  # a later turn, behind long answers: no room is left, which is a result and no reason to stop
            generation = Generation(stop="context")
        generations.append(generation)
        answers.append(answer_text(loaded.template, loaded.tokenizer, generation.tokens))
    return {
        "index": index,
        "turns": answers,
        "decoding_steps": [len(g.steps) for g in generations],
        "new_tokens": [len(g.tokens) for g in generations],
        "wall_time": [g.prefill_s + g.decode_s for g in generations],
        "accept_lengths": [n for g in generations for n in g.accept_lengths],
        # beyond Spec-Bench's keys, one entry a turn:
        "prefill_time": [g.prefill_s if method.drafter else None for g in generations],
        "decode_time": [g.decode_s if method.drafter else None for g in generations],
        "forwards": [g.forwards for g in generations],
        "stop": [g.stop for g in generations],
        "output_ids": [g.tokens for g in generations],
        # the step records: nodes forwarded and rank path accepted
        "step_nodes": [[s.nodes for s in g.steps] for g in generations],
        "step_paths": [[list(s.rank_path) for s in g.steps] for g in generations] if method.drafter else None,
    }


def summarise(store: AnswerStore, done: dict[Any, Row], method: Method) -> None:
    """Write the run's overall figures and keep the last state for other runs to start from."""
    summary: dict[str, Any] = asdict(measure(list(done.values())))
    state = {}
    if method.drafter is not None and (told := method.drafter.describe()):
        summary["drafter"] = told
    if method.drafter is not None and method.start not in (None, COLD):
        state = method.drafter.state_dict()
        summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
    store.finish(summary, state, len(done))


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    try:
        with distributed.one_voice():
            run(cfg)
    except Exception as error:
        message = told(error)
        if message is None:
            raise
        return Failure(message)  # noted and not raised: the other jobs of a sweep go on
    return None


def main() -> None:
    """The command line."""
    Failure.noted.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra's own errors come through to us, to be told in one line
    with user_errors(), distributed.one_voice():
        distributed.check_launcher(sys.argv[1:])
        try:
            _job()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_config_error(error)) from None
        distributed.leave()
    if Failure.noted:
        fail("; ".join(Failure.noted))


def _config_error(error: Exception) -> str:
    """Hydra's message on one line, without its hints about stack traces."""
    text = one_line(error)
    if "hydra/launcher" in text:
        return "this launcher is not installed; its pip line stands in requirements-cluster.txt"
    return re.sub(r"\s*(full_key: \S+|object_type=\S+|Config search path:.*|Set the environment variable.*)", "", text)


if __name__ == "__main__":
    main()
