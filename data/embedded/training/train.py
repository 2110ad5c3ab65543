"""Train the embedded model from nothing: `python -m data.embedded.training.train`."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from evaluation.errors import user_errors
from model.errors import UserError
from model.files import ROOT

from . import tokenizer as tokenizers_
from .corpus import training
from .dialogue import batches, encode

FOLDER = ROOT / "data/embedded"
TOKENIZER_SAMPLE = 6000  # dialogues
POOL = 512  # dialogues that are sorted by length together
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's iteration


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights."""

    steps: int = 6000
    batch_tokens: int = 3072
    warmup: int = 60
    cooldown: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    embedding_lr: float = 1e-2
    seed: int = 7
    threads: int = 1
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    intermediate: int = 512

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_tokens < 512:
            raise UserError("steps must be at least 1 and batch_tokens at least 512")

    def rate(self, step: int) -> float:
        """Warm up, hold, then cool down linearly to nothing."""
        cooling = self.steps * self.cooldown
        return min(1.0, (step + 1) / self.warmup, max(0.0, (self.steps - step) / cooling))


# The small model that drafts for the embedded one (`method=sps`), at most 1 MB in float16.
DRAFT = Recipe(steps=3000, hidden=96, layers=1, heads=4, intermediate=192)


def orthogonalize(updates: Tensor, iterations: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix.  # (matrices, rows, columns)"""
    a, b, c = COEFFICIENTS
    tall = updates.size(-2) > updates.size(-1)
    x: Tensor = updates.mT if tall else updates
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonal update (Keller Jordan, 2024); matrices of one shape are stacked, faster on a CPU."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every matrix."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape].append(p)
            for params in shapes.values():
                self._update(params, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, momentum: float, decay: float) -> None:
        nesterov = []
        for p in params:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            nesterov.append(p.grad.lerp(buffer, momentum))
        scale = max(1.0, params[0].size(0) / params[0].size(1)) ** 0.5
        for p, update in zip(params, orthogonalize(torch.stack(nesterov)), strict=True):
            p.mul_(1 - lr * decay).add_(update, alpha=-lr * scale)


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    embedding = model.model.embed_tokens.weight
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "lm_head" in name]
    adam = [{"params": [embedding], "lr": recipe.embedding_lr}, {"params": others, "lr": recipe.adam_lr}]
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def build_tokenizer() -> Tokenizer:
    """The tokenizer of the first dialogues of the corpus."""
    return tokenizers_.build(dialogue.text() for dialogue in islice(training(), TOKENIZER_SAMPLE))


def build_model(recipe: Recipe, vocabulary: int) -> LlamaForCausalLM:
    """A small LLaMA with fresh weights."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Blocks begin as the identity over clear token embeddings: copying is then learned sooner.
        for name, p in model.named_parameters():
            if "embed_tokens" in name:
                p.normal_(0.0, 0.5)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                p.zero_()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False)
    return model


def loss_of(model: LlamaForCausalLM, ids: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of the next token where it is wanted; logits are computed there only.

    Rows are padded on the right, so the causal mask alone is right.

    Args:
        ids, wanted: (rows, length), as `batches` yields them.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counts = wanted[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[counts]), ids[:, 1:][counts])


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in float16; the configuration says float32, which is what they are meant to run in."""
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.float32
    model.save_pretrained(folder, state_dict=state)
    model.config.save_pretrained(folder)


def train(recipe: Recipe, tokenizer: Tokenizer, folder: Path | None = None, *, every: int = 200) -> LlamaForCausalLM:
    """Run the recipe; write a checkpoint to `folder` every so many steps."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    model = build_model(recipe, tokenizer.get_vocab_size())
    model.train()
    both = optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, recipe.rate) for optimizer in both]
    started, seen, running = time.perf_counter(), 0, 0.0
    stream = batches(encode(tokenizer, training()), POOL, recipe.batch_tokens, recipe.seed)
    for step, (ids, wanted) in enumerate(islice(stream, recipe.steps), 1):
        # Weights, moments and norms stay in float32; products in bfloat16 take 0.7 of the time.
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids, wanted)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        seen += ids[:, 1:].numel()
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 20 == 0 or step == recipe.steps:
            spent = time.perf_counter() - started
            print(
                f"step {step}/{recipe.steps} loss {running:.4f} {seen / spent:.0f} tokens/s, "
                f"{spent:.0f} s spent, {spent / step * (recipe.steps - step):.0f} s to go",
                flush=True,
            )
        if folder is not None and (step % every == 0 or step == recipe.steps):
            save(model, folder)
    return model


def main(arguments: list[str] | None = None) -> None:
    """Build the tokenizer, train, save."""
    parser = argparse.ArgumentParser(prog="python -m data.embedded.training.train", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder (default: data/embedded; of --draft data/embedded/draft)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--every", type=int, default=200, help="write a checkpoint every N steps (default %(default)s)")
    parser.add_argument("--draft", action="store_true", help="train the small draft model, with the model's tokenizer")
    with user_errors():
        options = parser.parse_args(arguments)
        recipe = DRAFT if options.draft else Recipe()
        recipe = recipe if options.steps is None else replace(recipe, steps=options.steps)
        output = options.output or (FOLDER / "draft" if options.draft else FOLDER)
        if options.draft:
            tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        else:
            tokenizer = build_tokenizer()
            tokenizers_.save(tokenizer, output, 4096)
        train(recipe, tokenizer, output, every=options.every)


if __name__ == "__main__":
    main()
