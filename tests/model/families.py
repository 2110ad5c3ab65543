"""Every causal family of transformers as a toy model, decoded by three methods: docs/models.csv.

python -m tests.model.families [FAMILY ...]     rewrites these families' rows, or all in some minutes
"""

from __future__ import annotations

import csv
import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model.engine import Target, generate
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate
from model.methods import make_method
from tests.conftest import sharpened

TABLE = ROOT / "docs" / "models.csv"
NEW = 16
MOST_PARAMETERS = 7_000_000
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "dynamic": {"nodes": 10},
    "recycling": {"tree": "best:16"},
}
PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, *[5, 9, 13, 7, 20, 21, 22] * 3, 30, 31, 5, 9]
SIZES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def families() -> list[str]:
    """List the families of causal models that transformers has, encoder-decoders left out."""
    names = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            if CONFIG_MAPPING[name]().is_encoder_decoder:
                continue
        except Exception:  # a configuration without defaults; it is reported as not built
            pass
        names.append(name)
    return names


def toy(family: str) -> Any:
    """Return a random model of a family, sharpened so that its text depends on all that it sees."""
    text = CONFIG_MAPPING[family]().get_text_config()
    names = {
        *vars(text),
        *getattr(text, "attribute_map", {}),
        *inspect.signature(type(text).__init__).parameters,
    }
    own = SIZES["own"].get(family, {})
    sizes = SIZES["small"] | own
    values = {name: value for name, value in sizes.items() if name in names or name in own}
    config = type(text)(
        **{name: v for name, v in values.items() if v is not None or name == "eos_token_id"}
    )
    with torch.device("meta"):
        size = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > MOST_PARAMETERS:
        raise ValueError(f"has {size} parameters at its smallest")
    torch.manual_seed(0)
    return sharpened(AutoModelForCausalLM.from_config(config).eval(), 3.0)


def verdict(family: str) -> tuple[str, str]:
    """Say whether a family is driven.

    Returns:
        yes, no (refused) or not built, and how or why; WRONG where a text is another one.
    """
    try:
        model = toy(family)
        own = _generated(model)
    except Exception as error:  # whatever a family of transformers makes of such sizes
        return "not built", f"{type(error).__name__}"
    try:
        target = Target(model)
    except UserError as error:
        return "no", str(error).partition(": ")[2]
    try:
        other = _others(model, target, own)
    except Exception as error:  # a traceback is as wrong as a wrong text
        other = [f"{type(error).__name__}: {error}"]
    if other:
        return "WRONG", ", ".join(other)
    windows = "windows or chunks" if target._windows else ""
    return "yes", ", ".join(
        filter(None, ("recurrent states, drafts are chains" if target.recurrent else "", windows))
    )


def _others(model: Any, target: Target, own: list[int]) -> list[str]:
    """Decode by each method, cold and then hot, and inside `generate`; return which give another text."""
    other = []
    for name, given in METHODS.items():
        drafter = make_method(name, target, **given)
        for start in ("cold", "hot") if drafter.stateful else ("cold",):
            if generate(target, drafter, PROMPT, max_new_tokens=NEW).tokens != own:
                other.append(f"{name} {start}")
    if _generated(model, custom_generate=Generate(nodes=8, linear="torch")) != own:
        other.append("generate")
    return other


def _generated(model: Any, **settings: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    settings |= dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
        0, len(PROMPT) :
    ].tolist()
    return tokens


def rows() -> dict[str, tuple[str, str]]:
    """Return what the list says of each family."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["family"]: (row["works"], row["why"]) for row in csv.DictReader(file)}


def write(verdicts: dict[str, tuple[str, str]]) -> None:
    """Write docs/models.csv."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["family", "works", "why"])
        for family, verdict in sorted(verdicts.items()):
            table.writerow([family, *verdict])


def main(names: list[str]) -> None:
    """The command line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts = rows() if names else {}
    for family in names or families():
        verdicts[family] = verdict(family)
        print(family, *verdicts[family], flush=True)
        write(verdicts)


if __name__ == "__main__":
    main(sys.argv[1:])
