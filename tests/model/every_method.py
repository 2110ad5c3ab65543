"""Every method of the register on a toy model: small, of a fixed size, with the files that some of them need."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from model.engine import Draft, Drafter, Session, Target
from model.methods import METHODS, make_method
from model.methods.copying.datastore import write_datastore
from tests.conftest import greedy
from tests.model.engine.test_tree import random_tree
from tests.model.methods.heads import write_eagle, write_eagle3, write_hydra, write_medusa

V = 61
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in METHODS},
    "suffix": dict(max_draft=12),
    "suffix with history": dict(max_draft=12, history_tokens=4096),
    "suffix_decoding as trees": dict(
        branches=True, factor=2.0, offset=4.0, min_token_prob=0.01, cached_answers=2
    ),
    "suffix_recycling": dict(tree="best:12", min_match=2),
    "recycling": dict(tree="2.2.2"),
    "recycling of the prompt": dict(tree="best:12", recycle_prompt=True),
    "dynamic": dict(nodes=12, pairs=64),
    "goose": dict(nodes=24),
    "logitspec": dict(nodes=24),
    "racer": dict(nodes=12, trie_nodes=300),
    "eagle2": dict(nodes=12, depth=3, top_k=4),
    "eagle3": dict(nodes=12, depth=3, top_k=4),
    "samd": dict(nodes=12, depth=3, top_k=4, max_draft=12),
}


def write_companions(model: PreTrainedModel, folder: Path) -> dict[str, dict[str, Any]]:
    """Heads, a draft model and a datastore of some of the model's own answers; returns the settings that name them."""
    eagle = write_eagle(folder / "eagle", model)
    model.save_pretrained(folder / "draft")
    answers = [token for first in range(3, 11) for token in greedy(model, [first] * 3, 30)]
    write_datastore(folder / "datastore", np.array(answers), V)
    return {
        "medusa": {"heads_path": write_medusa(folder / "medusa", model)},
        "eagle": {"head_path": eagle},
        "eagle2": {"head_path": eagle},
        "hydra": {"hydra_path": write_hydra(folder / "hydra", model)},
        "eagle3": {"eagle3_path": write_eagle3(folder / "eagle3", model)},
        "samd": {"head_path": eagle},
        "sps": {"draft_path": str(folder / "draft")},
        "rest": {"datastore_path": str(folder / "datastore")},
    }


def make(name: str, target: Target, companions: dict[str, dict[str, Any]], **more: Any) -> Drafter:
    """A method of SETTINGS for this target; `more` may hold eos, and other settings."""
    return make_method(name.split()[0], target, **SETTINGS[name] | companions.get(name, {}) | more)


class Oracle(Drafter):
    """Knows the answer and drafts it on a random path of a random tree, from the first step on."""

    max_nodes = 31

    def __init__(self, answer, seed=0):
        super().__init__(torch.device("cpu"))
        self.answer = answer
        self.seed = seed

    def session(self):
        return OracleSession(self)


class OracleSession(Session):
    def __init__(self, method):
        super().__init__(method)
        self.answer = method.answer
        self.at = 0
        self.rng = random.Random(method.seed)

    def begin(self, prompt):
        return None

    def observe(self, verification):
        self.at += len(verification.tokens)

    def draft(self, root):
        tree = random_tree(30, self.rng)
        tokens = torch.tensor([root] + [self.rng.randrange(V) for _ in range(30)])
        path = tree.chain_of[self.rng.randrange(31)][1:]
        for node, token in zip(path, self.answer[self.at :], strict=False):
            tokens[node] = token
        return Draft(tree, tokens)
