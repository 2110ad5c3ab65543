"""Train heads on a frozen model: python -m tools.heads.train medusa|eagle --model M --text FILE --output FOLDER."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.embedded.training.dialogue import batches
from evaluation.errors import one_line
from evaluation.loading.models import load_model
from evaluation.loading.settings import ModelSettings
from model.engine import Target
from model.errors import UserError
from model.files import save_state, write_json
from model.methods import medusa
from model.methods.medusa import MedusaHeads
from model.structures.heads import WEIGHTS as EAGLE_WEIGHTS
from model.structures.heads import EagleHead, head_config, hidden_size
from tools.heads.losses import eagle_loss, medusa_loss
from tools.heads.text import sequences

POOL = 256  # sequences sorted by length together


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the heads, except the model and the text."""

    kind: str  # medusa | eagle
    steps: int = 400
    batch_tokens: int = 3072
    length: int = 1024  # of a sequence
    rate: float = 2e-3  # peak learning rate
    heads: int = 4  # medusa: as many as its published tree is deep
    layers: int = 1  # medusa: residual blocks a head
    shared_lm_head: bool = False  # medusa: use the target's projection for all heads
    class_weight: float = 0.1  # eagle: weight of the cross-entropy next to the regression (paper: 0.1)
    intermediate: int | None = None  # eagle: width of the layer's MLP; default: the target's
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("steps", "batch_tokens", "length", "heads", "layers"):
            if getattr(self, key) < 1:
                raise UserError(f"--{key.replace('_', '-')} {getattr(self, key)}: must be at least 1")
        if self.rate <= 0:
            raise UserError(f"--rate {self.rate}: must be above 0")

    def rate_at(self, step: int) -> float:
        """Return the learning rate: a warm-up over a twentieth of the steps, then a half cosine to 0."""
        warm = max(1, self.steps // 20)
        return self.rate * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def new_heads(recipe: Recipe, target: Target) -> MedusaHeads | EagleHead:
    """Build untrained heads: Medusa's as copies of the target's head (paper, 2.2.1), EAGLE's at random."""
    torch.manual_seed(recipe.seed)
    hidden, lm_head = hidden_size(target), target.model.get_output_embeddings()
    if recipe.kind == "medusa":
        heads = MedusaHeads(recipe.heads, recipe.layers, hidden, target.vocab_size, shared=recipe.shared_lm_head)
        if not recipe.shared_lm_head:
            with torch.no_grad():
                for head in heads:
                    head.load_state_dict({f"{recipe.layers}.weight": lm_head.weight}, strict=False)
        return heads.float().to(target.device)
    return EagleHead(
        head_config(_eagle_config(recipe, target)), target.model.get_input_embeddings().weight.detach()
    ).to(target.device)


def _eagle_config(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Return the configuration of a LLaMA layer of the target's proportions."""
    config, hidden = target.model.config.get_text_config(), hidden_size(target)
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": hidden // heads,
        "intermediate_size": recipe.intermediate or getattr(config, "intermediate_size", None) or 4 * hidden,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.context,
        "rope_theta": rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0,
    }


def train(recipe: Recipe, target: Target, tokenizer: Any, text: str, report: int = 20) -> MedusaHeads | EagleHead:
    """Train heads by the recipe; the target stays frozen. Raises UserError for a text that cannot be read."""
    heads, device = new_heads(recipe, target), target.device
    model = target.model.requires_grad_(False).eval()
    lm_head = model.get_output_embeddings()
    # Gradients flow through the target's head into ours, so it is in float32 like ours.
    if target.dtype != torch.float32:
        half = lm_head
        lm_head = nn.Linear(half.weight.shape[1], half.weight.shape[0], bias=half.bias is not None, device=device)
        lm_head.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
        lm_head.requires_grad_(False)
        if isinstance(heads, EagleHead):
            heads.embedding = heads.embedding.float()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(recipe.seed)
    items = sequences(text, tokenizer, min(recipe.length, target.context), recipe.seed)
    stream = batches(items, POOL, recipe.batch_tokens, recipe.seed)
    started, running = time.perf_counter(), 0.0
    for step, (ids, wanted) in enumerate(islice(stream, recipe.steps)):
        ids, wanted = ids.to(device), wanted.to(device)
        with torch.no_grad():  # rows are padded on the right, so a causal mask suffices
            features = model.get_decoder()(input_ids=ids, use_cache=False)[0].float()  # (B, T, H)
        if isinstance(heads, MedusaHeads):
            loss = medusa_loss(heads, lm_head, features, ids, wanted)
        else:
            loss = eagle_loss(heads, lm_head, features, ids, wanted, recipe.class_weight, generator)
        if not loss.requires_grad:  # this batch has nothing to predict
            continue
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 0.5)
        optimizer.step()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if (step + 1) % report == 0 or step + 1 == recipe.steps:
            spent = time.perf_counter() - started
            print(
                f"step {step + 1}/{recipe.steps} loss {running:.4f}, {spent:.0f} s spent, "
                f"{spent / (step + 1) * (recipe.steps - step - 1):.0f} s to go",
                flush=True,
            )
    return heads


def save(heads: MedusaHeads | EagleHead, recipe: Recipe, target: Target, folder: Path) -> int:
    """Write weights (float16) and config.json; returns the bytes of the weights."""
    origin = {"base_model_name_or_path": target.name, "training_steps": recipe.steps}
    if isinstance(heads, MedusaHeads):
        file = folder / medusa.WEIGHTS
        config = {
            "medusa_num_heads": recipe.heads,
            "medusa_num_layers": recipe.layers,
            "shared_lm_head": recipe.shared_lm_head,
            "hidden_size": hidden_size(target),
            "vocab_size": target.vocab_size,
        }
    else:
        file, config = folder / EAGLE_WEIGHTS, _eagle_config(recipe, target)
    save_state({name: tensor.detach().half() for name, tensor in heads.state_dict().items()}, file)
    write_json(folder / "config.json", config | origin)
    return file.stat().st_size


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.heads.train", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    fields = Recipe(kind="medusa")

    def number(to: argparse.ArgumentParser, key: str, text: str, of: type = int) -> None:
        default = getattr(fields, key)
        to.add_argument(f"--{key.replace('_', '-')}", type=of, default=default, help=f"{text} (default {default})")

    both = [kinds.add_parser("medusa", help="Medusa-1 heads"), kinds.add_parser("eagle", help="for eagle and eagle2")]
    for each in both:
        each.add_argument("--model", required=True, help="folder or hub name of the target, which stays frozen")
        each.add_argument("--text", required=True, help=".txt, .jsonl (a `text` per row), or `embedded`")
        each.add_argument("--output", required=True, type=Path, help="folder for weights and config.json")
        each.add_argument("--device", default="auto")
        each.add_argument("--dtype", default="auto", help="of the target")
        number(each, "steps", "optimizer steps")
        number(each, "batch_tokens", "tokens a step, padding included")
        number(each, "length", "longest sequence, in tokens")
        number(each, "rate", "peak learning rate", float)
        number(each, "seed", "of weights, order and noise")
    number(both[0], "heads", "tokens drafted beyond the next")
    number(both[0], "layers", "residual blocks a head")
    both[0].add_argument("--shared-lm-head", action="store_true", help="use the target's own projection")
    number(both[1], "class_weight", "weight of the cross-entropy next to the regression", float)
    both[1].add_argument("--intermediate", type=int, help="width of the MLP (default: the target's)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Load, train, save."""
    options = vars(parse(arguments))
    try:
        settings = ModelSettings(
            name="path", path=options.pop("model"), device=options.pop("device"), dtype=options.pop("dtype")
        )
        text, output = options.pop("text"), options.pop("output")
        recipe = Recipe(**options)
        loaded = load_model(settings)
        heads = train(recipe, loaded.target, loaded.tokenizer, text)
        size = save(heads, recipe, loaded.target, output)
    except (UserError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{output}: {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
