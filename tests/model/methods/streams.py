"""A language model of two lines, and sessions driven by it without an engine: every node's logits are known exactly."""

import random
import zlib
from functools import cache

import torch

from model.engine import Draft, Drafter
from model.engine.sampling import candidates_of
from model.engine.verification import Verification, verify

V = 40


def logits_of(context: list[int], seed: int) -> torch.Tensor:
    """(V,): of the last token and a little of the one before; and, behind some, of how far the text is.

    So text repeats, and not for ever.
    """
    last, before = context[-1], context[-2] if len(context) > 1 else 0
    return _drawn(last, before % 3, len(context) // 25 if last % 5 == 0 else 0, seed)


@cache
def _drawn(*key: int) -> torch.Tensor:
    return 3 * torch.randn(V, generator=torch.Generator().manual_seed(zlib.crc32(repr(key).encode())))


def random_prompt(seed: int) -> list[int]:
    """Some tokens, some of them again."""
    rng = random.Random(seed)
    prompt = [rng.randrange(V) for _ in range(rng.randrange(1, 30))]
    return prompt + prompt[: rng.randrange(len(prompt))]


def observed(drafter: Drafter, draft: Draft, before: list[int], seed: int) -> Verification:
    """The draft verified behind the text before its root, with what the drafter needs of the logits."""
    tokens = draft.tokens.tolist()
    paths = [[tokens[i] for i in chain] for chain in draft.tree.chain_of]
    logits = torch.stack([logits_of(before + path, seed) for path in paths])
    verification = verify(draft, logits.argmax(-1))
    verification.candidates, verification.bits = candidates_of(logits, drafter.needs.candidates, drafter.needs.bits)
    verification.logits = logits if drafter.needs.logits else None
    return verification


def drafts(drafter: Drafter, prompt: list[int], steps: int, seed: int):
    """Each step's draft, its verification, and the text before its root; the last of a session of this drafter.

    Yields (draft, verification, text before the root), from the first step on, which is a chain with the prompt.
    """
    session, text = drafter.session(), list(prompt)
    draft = session.begin(prompt)
    if drafter.needs.prompt_logits:
        session.observe_prompt(prompt, torch.stack([logits_of(prompt[: i + 1], seed) for i in range(len(prompt))]))
    for _ in range(steps):
        verification = observed(drafter, draft, text[:-1], seed)
        session.observe(verification)
        yield draft, verification, text[:-1]
        text += verification.tokens
        draft = session.draft(text[-1])
    session.close()


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The draft's nodes, each as the tokens from below the root down to it, sorted; equal ones stay."""
    tokens = draft.tokens.tolist()
    return sorted(tuple(tokens[i] for i in chain[1:]) for chain in draft.tree.chain_of[1:])
