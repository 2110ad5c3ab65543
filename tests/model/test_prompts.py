"""Several prompts as a caller may give them: each one answered, or refused in one line."""

import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from model.decoder import Decoder
from model.errors import UserError
from tests.conftest import toy_model
from tests.model.test_decoder import Letters

SEVERAL = [
    (torch.tensor([[5, 6, 7], [8, 9, 10]]), [[5, 6, 7], [8, 9, 10]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    (({"input_ids": row} for row in ([5, 6], [7])), [[5, 6], [7]]),
    ([torch.tensor([5, 6]), np.array([[7]])], [[5, 6], [7]]),
    ((), []),
]
ENCODED = BatchEncoding({"input_ids": [[5, 6], [7, 8]]}, tensor_type="pt")
NOT_SEVERAL = [
    ("hello", "prompts: is of type str; give a list of"),
    (ENCODED, "prompts: is of type BatchEncoding"),
    (torch.tensor([5, 6, 7]), "prompt 1: prompt: is of type int"),
    ([[5, 6], None], "prompt 2: prompt: is of type NoneType"),
    ([{"role": "user", "content": "hi"}], "prompt 1: prompt: is a mapping of role, content"),
]


def test_several_prompts_are_taken_as_they_come_and_one_is_not_cut_to_pieces():
    """A text was answered letter by letter, ids one by one, an encoding by its keys."""
    decoder = Decoder(toy_model("llama"), Letters())
    for prompts, rows in SEVERAL:
        answers = decoder.generate_all(prompts, max_new_tokens=5, progress=False)
        alone = [decoder.generate(row, max_new_tokens=5).ids for row in rows]
        assert [answer.ids for answer in answers] == alone
    for prompts, says in NOT_SEVERAL:
        with pytest.raises(UserError, match=f"^{re.escape(says)}") as refused:
            next(decoder.answers(prompts, batch=2))
        assert "\n" not in str(refused.value)
