"""python -m evaluation.first_contact [model=NAME ... | --shape SHAPE]: check a new GPU, in about
five minutes.

Each check prints what was found, what is expected, and what a deviation means.
results/first_contact.json has all results. On a CPU, steps have the same fixed shapes but are not
captured.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from model.engine import Draft, Needs, Target, generate
from model.engine.step import Executor
from model.errors import one_line
from model.files import ROOT, write_json
from model.recycling import TokenRecycling, build_template
from model.tuning import GRAPH, captures, choose_execution

from .bench_step import STEPS, DraftedSteps, HfSteps, model_settings
from .errors import user_errors
from .loading.devices import exclusive, peak_bytes
from .loading.models import SHAPES, LoadedModel, devices_in_words, load_model, random_model
from .records.provenance import git_state, versions

OUTPUT = ROOT / "results/first_contact.json"
ROWS = (1, 25, 81)
CONTEXTS = (300, 1000, 2000)
TURNS = 4
# By check, in order: what is expected, and what a deviation means
EXPECTED = {
    "machine": (
        "driver 580 or later for CUDA 13; a C compiler, else nothing is compiled; SDPA's kernels in"
        " this order"
    ),
    "trial": (
        "graph, with kernels compiled; else it says which logits or error made steps eager or"
        " uncompiled"
    ),
    "types": (
        "graph in each of three types, with attention in parts; float16 alone was right on the"
        " first GPU"
    ),
    "drop": (
        "0.0 twice; else captured steps use memory that torch gave back: take execution=eager, and"
        " report it"
    ),
    "profile": (
        "kernels take most of the step; else the device waits between them. The longest are matrix"
        " products"
    ),
    "steps": (
        "ms grow little with rows and tokens, and compiled ones are fewer; else drafts pay less"
        " than estimated"
    ),
    "hf": (
        "the same ms twice; else each new length is planned for, and speedups over hf are too high"
    ),
    "setup": (
        "seconds for the first answer, next to none for the last; else steps are captured again and"
        " again"
    ),
    "memory": "the peak is little more than the weights and 2 GB; else set model.context lower",
    "threads": "true twice; else a thread breaks off or overwrites what another one captures",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.first_contact", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="as for evaluation.run: model=NAME, model.path=..."
    )
    parser.add_argument("--shape", help=f"random weights instead of a model: {', '.join(SHAPES)}")
    with user_errors(f"{OUTPUT} has what was found"), ExitStack() as stack:
        given = parser.parse_intermixed_args()
        used = stack.enter_context(exclusive(model_settings(given.overrides, given.shape)))
        contact = Contact(random_model(given.shape, used) if given.shape else load_model(used))
        found: dict[str, Any] = {
            "model": used.name,
            "device": devices_in_words(contact.loaded),
            "git": git_state(),
        }
        for name, expected in EXPECTED.items():
            try:
                found[name] = getattr(contact, name)()
            except (
                Exception
            ) as error:  # kernels and drivers raise what they like; the other checks go on
                found[name] = f"FAILED: {type(error).__name__}: {one_line(error)[:300]}"
            print(f"{name}: {found[name]}\n    expected: {expected}", flush=True)
            write_json(OUTPUT, found)  # after each check, as the next one may end the process


class Contact:
    """The checks, by their names in EXPECTED."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.target = loaded.target
        self.device = loaded.target.device
        self.way = GRAPH if captures(self.target) else "static"
        self.prompt = [
            3 + i * i % 97 for i in range(min(max(CONTEXTS) + 1, self.target.context - 200))
        ]

    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = versions("triton") | {
            "compiler": shutil.which("cc") or shutil.which("g++")
        }
        if self.device.type == "cuda":
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(
                query, capture_output=True, text=True, check=True
            ).stdout.split()
            found |= {
                "cuda": torch.version.cuda,
                "capability": torch.cuda.get_device_capability(self.device),
            }
            found["sdpa"] = [
                str(torch.nn.attention.SDPBackend(i)) for i in torch._C._get_sdp_priority_order()
            ]
        return found

    def trial(self) -> dict[str, str]:
        return vars(choose_execution(self.target))

    def types(self) -> dict[str, str]:
        """Return what the trial of a tiny model says, by the type of its numbers."""
        found = {}
        for dtype in ("float16", "bfloat16", "float32"):
            execution = choose_execution(
                random_model("tiny", replace(self.loaded.settings, dtype=dtype)).target
            )
            found[dtype] = f"{execution.name}: {execution.why}"
        return found

    def drop(self) -> list[float]:
        """Return how far a step's logits move after another is freed, without and with a capture by
        transformers.
        """
        return [self._moved(lambda **settings: None), self._moved(self.target.model.generate)]

    @torch.inference_mode()
    def _moved(self, capture: Callable[..., Any]) -> float:
        ids = torch.tensor([self.prompt[:16]], device=self.device)

        # (rows, V), of a step after the cached text
        def logits(executor: Executor, rows: int) -> Any:
            drafter = self._recycling(self.target, rows)
            drafter.needs = Needs(logits=True)
            draft = Draft(drafter.tree, torch.arange(3, 3 + rows, device=self.device))
            step, launch = executor.static_forward(
                cache, [draft], [(0, cache.length)], drafter, rows
            )
            launch()
            return step.logits.float().clone()  # type: ignore[union-attr]

        with self.target.cache(max(ROWS)) as cache:
            first, second = (Executor(self.target, execution=self.way) for _ in range(2))
            self.target.prefill(cache, self.prompt)
            before = logits(first, 25)
            logits(second, 81)
            del second
            gc.collect()
            capture(
                input_ids=ids,
                cache_implementation="static",
                max_new_tokens=8,
                do_sample=False,
                pad_token_id=0,
            )
            cache.length //= 2  # the next step writes elsewhere
            logits(Executor(self.target, execution=self.way), 25)
            # the last step wrote into the prompt's second half
            self.target.prefill(cache, self.prompt)
            return float((logits(first, 25) - before).abs().max())

    def profile(self) -> dict[str, Any]:
        """Return the number and ms of a step's kernels, and the ten longest."""
        profiler = torch.profiler.profile()
        time = "device" if self.device.type == "cuda" else "cpu"
        step_ms = self._ms(25, len(self.prompt) - 1, profiler)
        events = [
            (getattr(event, f"self_{time}_time_total"), event) for event in profiler.key_averages()
        ]
        rows = [
            (us / 1e3 / (1 + STEPS), event.count / (1 + STEPS), event.key[:80])
            for us, event in events
            if us
        ]
        total = {
            "step_ms": step_ms,
            "kernels": sum(row[1] for row in rows),
            "kernels_ms": sum(row[0] for row in rows),
        }
        return total | {"longest": sorted(rows, reverse=True)[:10]}

    def steps(self) -> dict[str, float]:
        """Return the ms of a step by rows and tokens of context, without and with the chosen
        kernels.
        """
        compiled = self.target.kernels
        found = dict[str, float]()
        for plain, rows, tokens in product((True, False), ROWS, CONTEXTS):
            self.target.kernels = nullcontext() if plain else compiled
            if tokens < len(self.prompt):
                found[f"{'plain' if plain else 'as chosen'}, {rows} x {tokens}"] = self._ms(
                    rows, tokens
                )
        return found

    def _ms(self, rows: int, tokens: int, watched: Any = None) -> float:
        """Return the median ms of a step, without the first turn, which captures. `watched` sees
        one more turn.
        """
        steps = DraftedSteps(self.target, self.prompt[: tokens + 1], self.way, rows - 1)
        for _ in range(TURNS):
            steps.take_turn()
        with watched or nullcontext():
            steps.take_turn()
        return 1e3 * statistics.median(steps.seconds[1:TURNS])

    def hf(self) -> list[float]:
        """Return the ms of a step of transformers' generate, twice at the same lengths."""
        steps = HfSteps(self.loaded, self.prompt[:300])
        steps.take_turn()
        steps.take_turn()
        return [1e3 * seconds for seconds in steps.seconds]

    def setup(self) -> list[float]:
        """Return the seconds that each of four answers spent on capturing."""
        drafter = self._recycling(self.target, 81)
        return [self._answer(self.target, drafter, [5, 6, 7, i]).setup_s for i in range(4)]

    def memory(self) -> dict[str, Any]:
        weights = sum(weight.numel() * weight.itemsize for weight in self.target.model.parameters())
        return {"peak_bytes": peak_bytes(self.target.devices), "weights_bytes": weights}

    def threads(self) -> list[bool]:
        """Return whether two models in two threads give the same tokens as each alone."""
        targets = [self.target, random_model("tiny", self.loaded.settings).target]

        def text(target: Target) -> Any:
            return self._answer(target, self._recycling(target, 81), [5, 6, 7]).tokens

        alone = [text(target) for target in targets]
        with ThreadPoolExecutor(2) as pool:
            return [one == other for one, other in zip(alone, pool.map(text, targets), strict=True)]

    def _answer(self, target: Target, drafter: TokenRecycling, prompt: list[int]) -> Any:
        return generate(target, drafter, prompt, max_new_tokens=60, execution=self.way)

    def _recycling(self, target: Target, rows: int) -> TokenRecycling:
        return TokenRecycling(
            target.vocab_size, build_template("best", nodes=rows - 1), device=target.device
        )


if __name__ == "__main__":
    main()
