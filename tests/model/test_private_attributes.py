"""Private attributes of dependencies that would go unnoticed if they were gone: each is tried on a real object here.

Others are read as they are, on a CPU too, so that any other test would fail.
"""

import ast

import pytest
import torch
from accelerate import cpu_offload
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from tests.conftest import toy_model
from tests.test_house import MODULES, tree

SMALL = dict(hidden_size=8, num_hidden_layers=1, vocab_size=9, state_size=2)
PRIVATE = {
    "_attn_implementation": lambda: toy_model("llama").config._attn_implementation == "sdpa",
    "_attn_implementation_internal": lambda: "_attn_implementation_internal" in vars(toy_model("llama").config),
    "_supports_attention_backend": lambda: toy_model("llama")._supports_attention_backend is True,
    "_is_stateful": lambda: MambaForCausalLM(MambaConfig(**SMALL))._is_stateful is True,
    "_get_default_generation_params": lambda: "temperature" in GenerationConfig._get_default_generation_params(),
    "_hf_hook": lambda: cpu_offload(toy_model("llama"), torch.device("cpu")).get_input_embeddings()._hf_hook.execution_device.type == "cpu",
    "_torchdynamo_orig_callable": lambda: torch.compile(torch.nn.Identity().forward)._torchdynamo_orig_callable is not None,
    "_orig_mod": lambda: isinstance(torch.compile(torch.nn.Identity())._orig_mod, torch.nn.Identity),
    "_cuda_clearCublasWorkspaces": lambda: not torch.version.cuda or torch._C._cuda_clearCublasWorkspaces,
    "_device_count_nvml": lambda: isinstance(torch.cuda._device_count_nvml(), int),  # on a GPU alone
}  # fmt: skip


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_attribute_is_there(name):
    assert PRIVATE[name]()


def test_every_private_attribute_that_may_be_absent_is_tried_above():
    names = set()
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", "")
            if named in ("getattr", "hasattr") and not module.startswith("tests"):
                names.add(str(getattr(node.args[1], "value", "")))
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    assert private <= PRIVATE.keys()
