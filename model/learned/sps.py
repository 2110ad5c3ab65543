"""Speculative decoding: a small draft model proposes the next tokens one by one (arXiv 2211.17192), here greedily.

With a fixed draft length this is transformers' assisted generation (num_assistant_tokens_schedule="constant",
assistant_confidence_threshold=0): same tokens, same number of target forwards. As there, the prefill verifies a draft.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from ..decoding import Draft, Drafter, Target, Tree, Verification
from ..errors import UserError
from ..files import located

TRAIN = "python -m tools.embedded.train --draft"


class Speculative(Drafter):
    """Drafts a chain with a second model on a cache of its own, which follows the tokens that stand.

    Nothing is carried from prompt to prompt.

    Args:
        target: the model that verifies; the draft model takes its device, its dtype and its context.
        draft_path: folder of the draft model, a causal LM of the same vocabulary whose weights are in safetensors.
        draft_tokens: tokens drafted a step (gamma in the paper).
        eos: a draft stops before these.

    Raises:
        UserError: draft_tokens below 1; no such folder; weights that do not load, or not from safetensors; another
            vocabulary; a model that the engine cannot drive.
    """

    def __init__(self, *, target: Target, draft_path: str, draft_tokens: int = 4, eos: Collection[int] = ()) -> None:
        if draft_tokens < 1:
            raise UserError(f"sps: draft_tokens={draft_tokens} must be at least 1")
        super().__init__(target.device)
        model = load_draft_model(draft_path, target)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.model = Target(model, context=min(target.context, limit or target.context), packed=target.packed)
        if self.model.vocab_size != target.vocab_size:
            raise UserError(
                f"sps: the draft model {draft_path} has a vocabulary of {self.model.vocab_size} tokens, the target of "
                f"{target.vocab_size}; the two must share one tokenizer"
            )
        self.draft_tokens, self.eos = draft_tokens, frozenset(eos)
        self.max_nodes = 1 + draft_tokens
        self.tree = None  # a draft is shorter where it meets the end of an answer
        self._text: list[int] = []  # prompt and output, the root last
        self.model.reserve(self.max_nodes)

    def begin(self, prompt: list[int]) -> Draft:
        self._text = list(prompt)
        root = self.root_alone(prompt[-1])
        if len(prompt) >= self.model.context:  # the draft model does not see so far
            return root
        logits = self.model.prefill(prompt, root)  # (1, V)
        self.model.cache.commit(1)
        return self._propose(logits)

    def draft(self, root: int) -> Draft:
        if len(self._text) >= self.model.context:
            return self.root_alone(root)
        # The root, and where the last draft stood whole its last token, too: it was drafted and never forwarded.
        unseen = self._text[self.model.cache.length :]
        chain = Tree.chain(len(unseen) - 1).on(self.device)
        logits = self.model.forward(Draft(chain, torch.tensor(unseen, device=self.device)))  # (1 or 2, V)
        self.model.cache.commit(len(unseen))
        return self._propose(logits[-1:])

    def observe(self, verification: Verification) -> None:
        self._text += verification.tokens
        # Rejected drafts leave the cache; its next forward writes over them.
        self.model.cache.length = min(self.model.cache.length, len(self._text) - 1)

    def _propose(self, logits: torch.Tensor) -> Draft:
        """The draft after the root, whose logits (1, V) these are. One transfer to the host, at the end."""
        drafts = [logits.argmax(dim=-1)]  # (1,) each
        while len(drafts) < self.draft_tokens:
            drafts.append(self.model.forward(Draft(self._alone, drafts[-1])).argmax(dim=-1))
            self.model.cache.commit(1)
        tokens = torch.cat(drafts).tolist()
        tokens = next((tokens[:i] for i, token in enumerate(tokens) if token in self.eos), tokens)
        tree = Tree.chain(len(tokens)).on(self.device)
        return Draft(tree, torch.tensor([self._text[-1], *tokens], device=self.device))


def load_draft_model(path: str, target: Target) -> Any:
    """A causal LM from a folder's safetensors, on the target's device and in its dtype.

    Raises:
        UserError: no such folder, no configuration, no weights in safetensors, or some are missing or do not load.
    """
    folder = located(path)
    if not folder.is_dir():
        raise UserError(f"sps: no draft model in {path}; train the embedded one by `{TRAIN}`, or name a folder")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=target.dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"sps: draft model {path} cannot be loaded ({' '.join(str(error).split())[:300]})") from None
    if report["missing_keys"]:
        raise UserError(f"sps: draft model {path} lacks weights ({', '.join(sorted(report['missing_keys']))[:300]})")
    return model.to(target.device).eval()
