"""Check a configuration, and report what is wrong in one line with its key.

A group's settings are the parameters of the function or class that takes them; the run's own are
the keys of configs/config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, make_dataclass
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from model.engine import Sampling
from model.engine.contract.sizing import finds_size
from model.errors import UserError, closest, one_line
from model.files import ROOT, local_path
from model.methods import AUTO, OFFERED, method_class
from model.recycling import build_template
from model.settings import check_settings, text_settings

from ..loading.bench import load_bench
from ..loading.hub import KINDS, fetch_companions
from ..loading.models import ModelSettings
from ..loading.server import Server
from ..loading.stock import StockSettings
from ..records.runs import IN_TABLES, INSIDE, SERVER, STOCK

GROUPS: dict[str, Any] = {
    "model": ModelSettings,
    "bench": load_bench,
    "tree": build_template,
    "sampling": Sampling,
}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")  # sampling settings that do not change the arg-max
# parameters of GROUPS set elsewhere: by the method, by the run, in code
NOT_SETTINGS = ("k", "seed", "processors")
MINIMUM = {
    "max_new_tokens": 1,
    "num_choices": 1,
    "batch": 1,
    "repeats": 1,
    "repeat": 0,
    "bench.begin": 0,
    "bench.end": 0,
    "seed": 0,
}
# A run's settings: the groups, and the keys of configs/config.yaml with the types of their values
# there.
SHIPPED = yaml.safe_load((ROOT / "configs/config.yaml").read_text(encoding="utf-8"))
OR_NULL = {"repeat": int | None, "run_dir": str | None}
NO_SETTINGS = ("defaults", "companions", "subject", "hydra")  # read by Hydra, or by other settings
TYPES = {key: OR_NULL.get(key, type(SHIPPED[key])) for key in SHIPPED if key not in NO_SETTINGS}
TYPES |= dict.fromkeys(("method", *GROUPS), dict)
RUN = make_dataclass("Settings", TYPES.items())
# settings that hold a text, as a command line names them; True: or null
TEXTS = text_settings(RUN) | {"method.name": False, "method.drafter": True}
TEXTS |= {f"companions.{kind.name}": True for kind in KINDS.values()}
TEXTS |= {f"method.{key}": True for key in KINDS}
for _group, _taker in {**GROUPS, "method": Server}.items():
    TEXTS |= {f"{_group}.{key}": null for key, null in text_settings(_taker).items()}

# ${plain:NAME} in configs/ makes a name fit for a folder. Registered at import, so in every process
# of a launcher.
OmegaConf.register_new_resolver(
    "plain", lambda name: re.sub(r"[^\w.-]+", "_", str(name)).strip("_."), replace=True
)
OmegaConf.register_new_resolver("methods", lambda: ",".join(IN_TABLES), replace=True)
OmegaConf.register_new_resolver("local", lambda path: str(local_path(path)), replace=True)


# ${last_part:PATH}: the name of a folder, however its path is spelled
OmegaConf.register_new_resolver(
    "last_part", lambda path: local_path(str(path)).resolve().name, replace=True
)


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise Hydra's errors as a UserError, without hints about stack traces."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        text = one_line(error)
        key = getattr(error, "full_key", None)

        if "hydra/launcher" in text:
            raise UserError(
                "this launcher is not installed; requirements-cluster.txt has its pip line"
            ) from None

        hints = (
            r"\s*(full_key: \S+|object_type=\S+|Config search path:.*"
            r"|Set the environment variable.*)"
        )
        text = re.sub(hints, "", text)
        if unknown := re.match(r"Could not override '([^']+)'|Key '(\w+)' is not in struct", text):
            name = unknown[1] or unknown[2]
            of_run = "" if "." in name else " of a run"
            raise UserError(f"{name}: no such setting{of_run}{meant(name)}") from None

        raise UserError(f"{key}: {text}" if key and key not in text else text) from None


def meant(name: str) -> str:
    """Name the settings that end like an unknown one, as the end of a message."""
    known = {*TYPES} | {f"sampling.{key}" for key in SHIPPED["sampling"]}
    for group in ("method", "companions", *GROUPS):
        for file in (ROOT / "configs" / group).glob("*.yaml"):
            keys = re.findall(r"^(\w+):", file.read_text("utf-8"), re.M)
            known |= {f"{group}.{key}" for key in keys}

    ends = [key.rpartition(".")[2] for key in known]
    end = closest(name.rpartition(".")[2], ends)
    others = [key for key in known - {name} if key.rpartition(".")[2] == end]
    return f"; did you mean {' or '.join(sorted(others))}?" if others else ""


def checked_config(cfg: DictConfig) -> dict[str, Any]:
    """Check and resolve a run's configuration, and fetch its method's companions.

    Raises UserError for a wrong setting, before anything is loaded or a device is waited for.
    """
    with config_errors():
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    check_settings(config, RUN, allow_extra=True)
    check_groups(config)

    for key in sorted({"name", "drafter"} - config["method"].keys()):
        raise UserError(f"method.{key}: a method needs this setting")
    for group in ("method", *GROUPS):
        for key in config[group].keys() & config.keys() - TYPES.keys():
            raise UserError(f"{key}: no setting of a run{meant(key)}")

    for key, least in MINIMUM.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and value < least:
            raise UserError(f"{key}={value}: must be a whole number, at least {least}")

    if config["phases"] and (config["batch"] > 1 or not config["timed"]):
        raise UserError(
            "phases=true: times the parts of one sequence's steps; use timed=true and batch=1"
        )

    Sampling(**config["sampling"])
    fetch_companions(config["method"], config["model"]["name"])
    options = dict(config["method"])
    name = options.pop("name")
    drafter = options.pop("drafter")
    sampling = changed_sampling(config)

    if drafter == SERVER:
        check_settings(options, Server, "method.")
        if sampling:
            raise UserError(
                f"sampling.{min(sampling)}: a server is asked for greedy answers; leave it out"
            )
    elif drafter is None:  # transformers' own generate
        taker = type(str(name), (StockSettings,), {})  # by whose name messages list the settings
        check_settings(options, taker, "method.")
        drafts = StockSettings(**options).drafts
        should_draft = name != "hf"
        if name in STOCK and drafts != should_draft:
            raise UserError(f"method={name}: lookup_tokens or draft_path makes it another method")
        if drafts and config["batch"] > 1:
            raise UserError(f"{name}: transformers drafts for one sequence; use batch=1")
    else:
        factory = method_class(drafter)
        check_settings(options, factory, "method.", without=OFFERED)
        nodes = str(options.get("nodes"))
        if nodes.startswith(AUTO) and finds_size(factory) and not config["timed"]:
            raise UserError(
                f"method.nodes={nodes}: sizes follow the times of steps, and timed=false takes"
                " none; use a number"
            )
        unfit = config["batch"] > 1 or config["phases"] or sampling
        if unfit and config["execution"] == INSIDE["eager"]:
            raise UserError(
                f"execution={config['execution']}: is for greedy answers, batch=1 and phases=false"
            )

    return config


def check_groups(config: dict[str, Any]) -> None:
    for group, what in (("model", "a folder, or a hub name"), ("bench", "a file of questions")):
        if group in config and config[group].get("path", "") is None:
            raise UserError(f"{group}.path: has to be given: {what}")

    for group in sorted(GROUPS.keys() & config.keys()):
        check_settings(config[group], GROUPS[group], f"{group}.", without=NOT_SETTINGS)


def changed_sampling(config: dict[str, Any]) -> dict[str, Any]:
    greedy = asdict(Sampling())
    sampling = config["sampling"]
    idle = () if sampling.get("temperature") else IDLE_IF_GREEDY
    return {
        key: sampling[key] for key in sampling if key not in idle and sampling[key] != greedy[key]
    }
