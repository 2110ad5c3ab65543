"""Train heads on a frozen model: python -m tools.heads medusa|eagle --model M --text FILE --output
FOLDER.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data.embedded.training.corpus import TRAINING_SEED, training
from data.embedded.training.dialogue import Encoded, batches, encode
from evaluation.errors import user_errors
from evaluation.loading.models import ModelSettings, load_model
from model.engine import Target
from model.errors import Parser, UserError
from model.files import save_state, write_json
from model.methods import eagle, medusa
from model.methods.eagle import EagleHead
from model.methods.medusa import MedusaHeads
from model.structures.heads import hidden_size, layer_config
from tools.datastore import documents

EMBEDDED = "embedded"  # the text that the shipped model was trained on
POOL = 256  # sequences sorted by length together
DECAY = 0.8  # weight of each further Medusa head (2401.10774, 2.2.1)
CLASS_WEIGHT = 0.1  # of the cross-entropy next to the regression (2401.15077, 4.2)
LENGTH = 1024  # tokens of the longest sequence
SEED = 0  # of weights, order and noise
NOISE = 0.1  # half-width of the uniform noise on EAGLE's features (2401.15077, 4.2)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the heads, except the model and the text."""

    kind: str  # medusa | eagle
    steps: int = 400
    rate: float = 2e-3  # the peak of the learning rate
    batch_tokens: int = 3072  # of a step, padding included
    heads: int = 4  # as many as the published tree is deep
    layers: int = 1  # residual blocks a head
    shared_lm_head: bool = False  # True: all heads use the target's own projection

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_tokens, self.heads, self.layers) < 1:
            raise UserError("steps, batch_tokens, heads and layers must be at least 1")
        if not 0 < self.rate < math.inf:
            raise UserError(f"rate={self.rate}: must be above 0")


def new_heads(recipe: Recipe, target: Target) -> MedusaHeads | EagleHead:
    """Build untrained heads.

    Medusa's are copies of the target's head (paper, 2.2.1), EAGLE's are random.
    """
    torch.manual_seed(SEED)
    if recipe.kind == "eagle":
        embedding = target.model.get_input_embeddings().weight.detach()
        return EagleHead(layer_config(_eagle_config(target)), embedding).to(target.device)

    shared = recipe.shared_lm_head
    sizes = (recipe.heads, recipe.layers, hidden_size(target), target.logits_size)
    heads = MedusaHeads(*sizes, shared=shared)
    if not shared:
        lm_head = target.model.get_output_embeddings()
        for head in heads:
            assert isinstance(head, torch.nn.Sequential)
            head[-1].load_state_dict({"weight": lm_head.weight})
    return heads.to(target.device)


def _eagle_config(target: Target) -> dict[str, Any]:
    """Return the configuration of a LLaMA layer of the target's proportions."""
    config = target.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    hidden = hidden_size(target)
    heads = config.num_attention_heads
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": target.logits_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": hidden // heads,
        "intermediate_size": getattr(config, "intermediate_size", 4 * hidden),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.context,
        "rope_theta": rope.get("rope_theta", 10000.0),
    }


def medusa_loss(
    heads: MedusaHeads,
    lm_head: nn.Module,
    features: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Sum the weighted cross-entropies of all heads.

    Head i has 0.8^(i + 1) times that of the token i + 2 after each position.

    Args:
        features: (B, T, H), the frozen target's last hidden states of ids (B, T).
        wanted: bool (B, T); a position counts for head i if the next token (the root) and the one
            predicted are wanted.
    """
    total = features.new_zeros(())
    for i in range(len(heads)):
        ahead = i + 2
        counts = wanted[:, 1 : ids.shape[1] - ahead + 1] & wanted[:, ahead:]  # (B, T - ahead)
        if counts.any():
            logits = heads.logits(i, features[:, :-ahead][counts], lm_head)  # (m, V)
            total = total + DECAY ** (i + 1) * F.cross_entropy(
                logits.float(), ids[:, ahead:][counts]
            )

    return total


def eagle_loss(
    head: EagleHead,
    lm_head: nn.Module,
    features: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Smooth L1 to the next feature, plus a weighted cross-entropy.

    CLASS_WEIGHT weights the cross-entropy to the target's distribution.

    Only positions whose next feature predicts a wanted token count. Noise on the features imitates
    the head's own errors while drafting.
    """
    noise = torch.rand(features.shape, generator=generator).to(features) - 0.5
    cos, sin = head.angles(ids.shape[1] - 1)
    # (B, T - 1, H): next features
    out = head((features + 2 * NOISE * noise)[:, :-1], ids[:, 1:], (cos, sin))

    counts = wanted[:, 2:]  # (B, T - 2)
    predicted = out[:, :-1][counts]  # (m, H)
    true = features[:, 1:-1][counts]  # (m, H)

    with torch.no_grad():
        probabilities = lm_head(true).float().softmax(dim=-1)  # (m, V)
    classes = F.cross_entropy(lm_head(predicted).float(), probabilities)
    return F.smooth_l1_loss(predicted, true) + CLASS_WEIGHT * classes


def sequences(text: str, tokenizer: Any, length: int) -> Iterator[Encoded]:
    """Yield token sequences forever, each at most `length` long.

    Args:
        text: `embedded` for the dialogues that the shipped model was trained on; only their answers
            are predicted. Else a file as for `tools.datastore`; all of its tokens are predicted.
        tokenizer: of the target, transformers' own kind.

    Raises:
        UserError: the file cannot be read, or holds fewer than 8 tokens.
    """
    if text == EMBEDDED:
        dialogues = training(TRAINING_SEED + SEED, easy_until=1)
        items = encode(tokenizer.backend_tokenizer, dialogues)
        yield from (item for item in items if len(item) <= length)

    chunks = []
    for document in documents([Path(text)]):
        ids = tokenizer("".join(document)).input_ids
        chunks += [ids[i : i + length] for i in range(0, len(ids), length)]

    chunks = [ids for ids in chunks if len(ids) >= 8]
    if not chunks:
        raise UserError(f"{text}: holds fewer than 8 tokens")
    rng = random.Random(SEED)
    while True:
        rng.shuffle(chunks)
        yield from (Encoded(ids, [True] * len(ids)) for ids in chunks)


def train(recipe: Recipe, target: Target, tokenizer: Any, text: str) -> MedusaHeads | EagleHead:
    """Train heads by the recipe; the target stays frozen.

    Raises UserError for a text that cannot be read.
    """
    heads = new_heads(recipe, target)
    device = target.device
    model = target.model.requires_grad_(False).eval()
    lm_head = model.get_output_embeddings()

    # Gradients flow through the target's head into ours, so it is in float32 like ours.
    if target.dtype != torch.float32:
        lm_head = copy.deepcopy(lm_head).float()

    optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    # warm up over a twentieth of the steps, then fall by a half cosine
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, total_steps=recipe.steps, pct_start=0.05, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(SEED)
    items = sequences(text, tokenizer, min(LENGTH, target.context))
    stream = batches(items, POOL, recipe.batch_tokens, SEED)

    started = time.perf_counter()
    for step, (ids, wanted) in enumerate(islice(stream, recipe.steps)):
        ids = ids.to(device)
        wanted = wanted.to(device)
        with torch.no_grad():  # rows are padded on the right, so a causal mask suffices
            features = model.get_decoder()(input_ids=ids, use_cache=False)[0].float()  # (B, T, H)
        if isinstance(heads, MedusaHeads):
            loss = medusa_loss(heads, lm_head, features, ids, wanted)
        else:
            loss = eagle_loss(heads, lm_head, features, ids, wanted, generator)

        if not loss.requires_grad:  # this batch has nothing to predict
            continue
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 0.5)
        optimizer.step()
        rates.step()

        if (step + 1) % 20 == 0 or step + 1 == recipe.steps:
            spent = time.perf_counter() - started
            print(
                f"step {step + 1}/{recipe.steps} loss {loss.item():.4f}, {spent:.0f} s", flush=True
            )

    return heads


def save(heads: MedusaHeads | EagleHead, recipe: Recipe, target: Target, folder: Path) -> int:
    """Write weights (float16) and config.json; returns the bytes of the weights."""
    if isinstance(heads, MedusaHeads):
        file = folder / medusa.WEIGHTS[0]
        config: dict[str, Any] = {
            "medusa_num_heads": recipe.heads,
            "medusa_num_layers": recipe.layers,
            "shared_lm_head": recipe.shared_lm_head,
            "hidden_size": hidden_size(target),
            "vocab_size": target.vocab_size,
        }
    else:
        file = folder / eagle.WEIGHTS[0]
        config = _eagle_config(target)

    config |= {"base_model_name_or_path": target.name, "training_steps": recipe.steps}
    save_state({name: tensor.detach().half() for name, tensor in heads.state_dict().items()}, file)
    write_json(folder / "config.json", config)
    return file.stat().st_size


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m tools.heads", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, words in (("medusa", "Medusa-1 heads"), ("eagle", "for eagle and eagle2")):
        add = kinds.add_parser(
            kind, help=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        ).add_argument
        add("--model", required=True, help="folder or hub name of the target, which stays frozen")
        add("--text", required=True, help=".txt, .jsonl (as of tools.datastore), or `embedded`")
        add("--output", required=True, type=Path, help="folder for weights and config.json")
        add("--device", default="auto", help="of the target")
        add("--dtype", default="auto", help="of the target")

        add("--steps", type=int, default=Recipe.steps, help="optimizer steps")
        add("--rate", type=float, default=Recipe.rate, help="peak learning rate")
        add("--batch-tokens", type=int, default=Recipe.batch_tokens, help="padding included")
        if kind == "medusa":
            add("--heads", type=int, default=Recipe.heads, help="tokens drafted beyond the next")
            add("--layers", type=int, default=Recipe.layers, help="residual blocks a head")
            add("--shared-lm-head", action="store_true", help="use the target's own projection")

    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Load, train, save."""
    with user_errors("nothing was written"):
        options = vars(parse(arguments))
        path = options.pop("model")
        on = {key: options.pop(key) for key in ("device", "dtype")}
        text = options.pop("text")
        output = options.pop("output")
        recipe = Recipe(**options)
        output.mkdir(parents=True, exist_ok=True)  # may fail: better before the training
        loaded = load_model(ModelSettings("path", path, **on))
        heads = train(recipe, loaded.target, loaded.tokenizer, text)
        size = save(heads, recipe, loaded.target, output)
        print(f"{output}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
