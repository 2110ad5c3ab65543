"""Train the embedded model: `python -m tools.embedded.train`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.embedded import tokenizer as tokenizers_
from tools.embedded.corpus import training
from tools.embedded.dialogue import Dialogue
from tools.embedded.encoding import Encoded, encode, shuffled, text_and_spans
from tools.embedded.optimizer import Muon

FOLDER = Path("data/embedded")
TOKENIZER_SAMPLE = 6000
POOL = 512
IGNORED = -100


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
            raise ValueError("steps must be at least 1 and batch_tokens at least 512")

    def rate(self, step: int) -> float:
        """Warm up, hold, then cool down linearly to nothing."""
        cooling = self.steps * self.cooldown
        return min(1.0, (step + 1) / self.warmup, max(0.0, (self.steps - step) / cooling))


# The small model that drafts for the embedded one (`method=sps`), at most 1 MB in float16.
DRAFT = Recipe(steps=3000, hidden=96, layers=1, heads=4, intermediate=192)


def build_tokenizer() -> Tokenizer:
    """The tokenizer of the first dialogues of the corpus."""
    dialogues = islice(training(), TOKENIZER_SAMPLE)
    return tokenizers_.build(text_and_spans(d.turns, d.answers)[0] for d in dialogues)


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


def batches(tokenizer: Tokenizer, dialogues: Iterator[Dialogue], tokens: int, seed: int) -> Iterator[list[Encoded]]:
    """Batches of similar length, of one pool after another."""
    rng = random.Random(seed)
    while True:
        yield from shuffled(encode(tokenizer, [(d.turns, d.answers) for d in islice(dialogues, POOL)]), tokens, rng)


def tensors(batch: list[Encoded]) -> tuple[Tensor, Tensor]:
    """Right-padded inputs and the next token to predict, IGNORED outside answers.  # both (rows, length)"""
    length = max(map(len, batch))
    inputs = torch.zeros(len(batch), length - 1, dtype=torch.long)
    labels = torch.full_like(inputs, IGNORED)
    for row, item in enumerate(batch):
        ids = torch.tensor(item.ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, : len(ids) - 1] = torch.where(torch.tensor(item.answer)[1:], ids[1:], IGNORED)
    return inputs, labels


def loss_of(model: LlamaForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy on the answers; logits are computed there only.

    Rows are padded on the right, so the causal mask alone is right.
    """
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    wanted = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[wanted]), labels[wanted])


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    embedding = model.model.embed_tokens.weight
    others = [p for n, p in model.named_parameters() if p is not embedding and not (p.ndim == 2 and "layers" in n)]
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(
            [{"params": [embedding], "lr": recipe.embedding_lr}, {"params": others, "lr": recipe.adam_lr}],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        ),
    ]


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in float16; the configuration says float32, which is what they are meant to run in."""
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.float32
    model.save_pretrained(folder, state_dict=state)
    model.config.save_pretrained(folder)


def train(
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    *,
    every: int = 100,
) -> LlamaForCausalLM:
    """Run the recipe; write a checkpoint to `folder` every so many steps."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    model = build_model(recipe, tokenizer.get_vocab_size())
    model.train()
    opts = optimizers(model, recipe)
    peaks = [[g["lr"] for g in o.param_groups] for o in opts]
    started, seen, running = time.perf_counter(), 0, 0.0
    stream = batches(tokenizer, training(), recipe.batch_tokens, recipe.seed)
    for step, batch in enumerate(islice(stream, recipe.steps)):
        for optimizer, peak in zip(opts, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * recipe.rate(step)
        inputs, labels = tensors(batch)
        # Weights, moments and norms stay in float32; products in bfloat16 take 0.7 of the time.
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, inputs, labels)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += inputs.numel()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        last = step + 1 == recipe.steps
        if (step + 1) % 20 == 0 or last:
            spent = time.perf_counter() - started
            eta = spent / (step + 1) * (recipe.steps - step - 1)
            print(
                f"step {step + 1}/{recipe.steps} loss {running:.4f} {(step + 1) / spent:.2f} steps/s "
                f"{seen / spent:.0f} tokens/s, {spent:.0f} s spent, {eta:.0f} s to go",
                flush=True,
            )
        if folder is not None and ((step + 1) % every == 0 or last):
            save(model, folder)
    return model


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded.train", description=__doc__)
    parser.add_argument(
        "--output", type=Path, help=f"folder of the checkpoint (default {FOLDER}; --draft: {FOLDER}/draft)"
    )
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps")
    parser.add_argument("--every", type=int, default=200, help="write a checkpoint every N steps (default %(default)s)")
    parser.add_argument(
        "--draft", action="store_true", help=f"train the small draft model instead, with the tokenizer in {FOLDER}"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Build the tokenizer, train, save."""
    options = parse(arguments)
    try:
        recipe = DRAFT if options.draft else Recipe()
        recipe = recipe if options.steps is None else replace(recipe, steps=options.steps)
        output = options.output or (FOLDER / "draft" if options.draft else FOLDER)
        if options.draft:  # the target's tokenizer serves both
            tokenizer = tokenizers_.load(FOLDER)
        else:
            tokenizer = build_tokenizer()
            tokenizers_.save(tokenizer, output, 4096)
        train(recipe, tokenizer, output, every=options.every)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
