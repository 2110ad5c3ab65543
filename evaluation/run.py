"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from model.errors import UserError

from . import distributed
from .answering import answer_all, warm_up
from .answers import AnswerStore, Row, write_json
from .cli import Failure, fail, one_line, told, user_errors
from .companions import make_ready
from .conversation import prompt_ids, template_hash
from .devices import devices_in_words, exclusive
from .methods import COLD, HOT, Method, build_method
from .metrics import measure
from .models import LoadedModel, ModelSettings, load_model
from .provenance import collect
from .questions import FILE_ORDER, ROOT, Bench, load_bench
from .quiet import cores_busy
from .sweeps import job_key

SAVED = "saved"  # start=saved: from what the hot run of the same configuration left


def run(cfg: DictConfig, answer_file: Path | None = None) -> list[Path]:
    """A configuration, as often as it says: load, warm up, answer what is not answered yet, summarise.

    Returns:
        The directories, one a repeat.

    Raises:
        UserError: whatever a user can mend.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    for key in ("max_new_tokens", "num_choices", "repeats"):
        if not isinstance(config[key], int) or config[key] < 1:
            raise UserError(f"{key}={config[key]}: must be a whole number, at least 1")
    repeats, repeat = config["repeats"], config["repeat"]
    if repeat is not None and (not isinstance(repeat, int) or repeat < 0):
        raise UserError(f"repeat={repeat}: must be null or a whole number from 0")
    if not isinstance(config["phases"], bool):
        raise UserError(f"phases={config['phases']}: must be true or false")
    if config["run_dir"] is not None and repeats > 1 and repeat is None:
        raise UserError(f"run_dir={config['run_dir']}: holds one run, but repeats={repeats}; leave out one of the two")
    model = ModelSettings(**config["model"])
    make_ready(config["method"], model.name)  # before the model is loaded, and devices are waited for
    with exclusive(model):
        wanted = range(repeats) if repeat is None else [repeat]
        return [_measure(config | {"repeat": index}, model, answer_file) for index in wanted]


def _measure(config: dict[str, Any], model: ModelSettings, answer_file: Path | None) -> Path:
    """The run, on devices that no other run uses meanwhile."""
    bench = load_bench(**config["bench"])
    loaded = load_model(model)
    loaded.target.execution = choose_execution(str(config["execution"]), loaded)
    saved = config["start"] == SAVED
    method = build_method(loaded, config["method"], config["tree"], HOT if saved else str(config["start"]))
    if saved and method.start is not None:
        method = build_method(loaded, config["method"], config["tree"], saved_start(config, model.name))
    if method.start in (None, COLD):  # nothing is carried on, so the order decides nothing: one run for all orders
        bench = load_bench(**config["bench"] | {"order": FILE_ORDER})
    settings = run_settings(config, bench, method)
    given: str | None = config["run_dir"]
    folder = Path(given) if given else default_folder(config, settings, method)
    check_prompts(bench, loaded)
    store = distributed.open_store(folder, answer_file)
    with store.locked():
        extra = {
            "label": method.label.replace("state)", f"{SAVED})") if saved else method.label,
            "device": devices_in_words(loaded),
            "execution_used": execution_used(method),
            "questions": len(bench.questions),
            "template_sha256": template_hash(loaded.template, loaded.tokenizer),
            "vocab_size": loaded.target.vocab_size,
            "generation_config_left_out": loaded.left_out,
            "cores_busy_elsewhere": cores_busy() if loaded.target.device.type == "cpu" else None,
            "draft_tree": " ".join(",".join(map(str, p)) for p in method.tree.rank_paths[1:]) if method.tree else None,
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


def saved_start(config: dict[str, Any], model: str) -> str:
    """start=saved: the state that the hot run of the same configuration left in this experiment's folder.

    Of a method with several rules of update it is the one that writes everything, as a frozen state was made by it.

    Raises:
        UserError: there is none yet.
    """
    wanted = _source(config | {"start": HOT}, "all")
    found: dict[int, str] = {}  # by repeat
    for path in sorted((Path(config["results_dir"]) / str(config["name"]) / "runs").glob("*/state.safetensors")):
        held = json.loads((path.parent / "metadata.json").read_text(encoding="utf-8"))["config"]
        if _source(held, held["method"].get("update", "all")) == wanted:
            found.setdefault(int(held["repeat"] or 0), str(path))
    if found:  # the same repeat's, as another one may not be there yet, and then this run would not be the same again
        return found.get(int(config["repeat"] or 0), found[min(found)])
    raise UserError(
        f"start=saved: there is no finished run of {config['method']['name']} with start=hot on {model} in "
        f"{config['results_dir']}/{config['name']}; run it first (in a sweep: start=hot,saved), or name a file"
    )


def _source(config: dict[str, Any], update: str) -> dict[str, Any]:
    """What decides the state that a run leaves."""
    kept = {key: value for key, value in config.items() if key not in ("run_dir", "repeat", "repeats", "preset")}
    return kept | {"method": config["method"] | {"update": update}}


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
        "bench": {"name": bench.name, "sha256": bench.sha256, "ids_sha256": _sha256(ids), "questions": len(ids)}
        | {"order": bench.order},
        "method": method.settings,
        "execution": loaded.target.execution,
        "max_new_tokens": config["max_new_tokens"],
        "num_choices": config["num_choices"],
        "seed": config["seed"],
        "phases": config["phases"],
        "repeat": config["repeat"],
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


def summarise(store: AnswerStore, done: dict[Any, Row], method: Method) -> None:
    """Write the run's overall figures and keep the last state for other runs to start from."""
    summary: dict[str, Any] = asdict(measure(list(done.values())))
    state = method.drafter.state_dict() if method.drafter is not None else {}
    summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
    if method.drafter is not None and (told := method.drafter.describe()):
        summary["drafter"] = told
    store.finish(summary, {} if method.start in (None, COLD) else state, len(done))


def note_done(cfg: DictConfig, folders: list[Path]) -> None:
    """Write down that this job of a sweep is done and where: several jobs may share a run."""
    job = [str(override) for override in HydraConfig.get().overrides.task]
    folder = Path(cfg.results_dir) / str(cfg.name)
    if (folder / "sweep.json").exists() and cfg.run_dir is None and distributed.rank() == 0:
        (folder / "jobs").mkdir(exist_ok=True)
        write_json(folder / "jobs" / f"{job_key(job)}.json", {"job": job, "runs": [path.name for path in folders]})


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    try:
        with distributed.one_voice():
            note_done(cfg, run(cfg))
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
            raise UserError(config_error(error)) from None
        distributed.leave()
    if Failure.noted:
        fail("; ".join(Failure.noted))


def config_error(error: Exception) -> str:
    """Hydra's message on one line, without its hints about stack traces."""
    text = one_line(error)
    if "hydra/launcher" in text:
        return "this launcher is not installed; its pip line stands in requirements-cluster.txt"
    return re.sub(r"\s*(full_key: \S+|object_type=\S+|Config search path:.*|Set the environment variable.*)", "", text)


if __name__ == "__main__":
    main()
