"""What the product reads of its dependencies that is not public: each name is tried on a real object here."""

import ast
import re

import numba
import pytest
import torch
from accelerate import cpu_offload
from hydra._internal import config_loader_impl
from hydra._internal.utils import create_config_search_path
from numba.core import cgutils
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from model.engine.compiled_layers import SETTINGS
from model.files import ROOT
from tests.conftest import toy_model
from tests.test_house import MODULES, tree

SMALL = dict(hidden_size=8, num_hidden_layers=1, vocab_size=9, state_size=2)


def compiled(module):
    module.compile(backend="eager")
    return module


def patched():
    with torch._dynamo.config.patch(SETTINGS):  # AttributeError for an unknown one
        return torch._dynamo.config.recompile_limit == SETTINGS["recompile_limit"]


def prepared():
    """What `generate` gives a function of custom_generate."""
    seen = []

    def note(model, input_ids, generation_config, **_):
        seen.append(generation_config)
        return input_ids

    toy_model("llama").generate(
        torch.tensor([[5]]), custom_generate=note, pad_token_id=0, max_new_tokens=1
    )
    return seen[0]


PRIVATE = {
    "_attn_implementation": lambda: toy_model("llama").config._attn_implementation == "sdpa",
    "_attn_implementation_internal": lambda: vars(toy_model("llama").config)["_attn_implementation_internal"] == "sdpa",
    "_supports_attention_backend": lambda: toy_model("llama")._supports_attention_backend is True,
    "_is_stateful": lambda: MambaForCausalLM(MambaConfig(**SMALL))._is_stateful is True,
    "_pad_token_tensor": lambda: int(prepared()._pad_token_tensor) == 0,
    "_get_default_generation_params": lambda: "temperature" in GenerationConfig._get_default_generation_params(),
    "_hf_hook": lambda: cpu_offload(toy_model("llama"), torch.device("cpu")).get_input_embeddings()._hf_hook.execution_device.type == "cpu",
    "_forward_hooks": lambda: torch.nn.Identity()._forward_hooks == {},
    "_forward_pre_hooks": lambda: torch.nn.Identity()._forward_pre_hooks == {},
    "_getvalue": lambda: callable(cgutils.create_struct_proxy(numba.types.complex64)._getvalue),
    "_compiled_call_impl": lambda: torch.nn.Identity()._compiled_call_impl is None and compiled(torch.nn.Identity())._compiled_call_impl is not None,
    "_torchdynamo_orig_callable": lambda: torch.compile(torch.nn.Identity().forward)._torchdynamo_orig_callable is not None,
    "_orig_mod": lambda: isinstance(torch.compile(torch.nn.Identity())._orig_mod, torch.nn.Identity),
    "_cuda_clearCublasWorkspaces": lambda: not torch.version.cuda or torch._C._cuda_clearCublasWorkspaces,
    "_device_count_nvml": lambda: isinstance(torch.cuda._device_count_nvml(), int),
    "_dynamo": patched,
    "_foreach_copy_": lambda: torch._foreach_copy_([torch.zeros(1)], [torch.ones(1)])[0].item() == 1,
    "_is_mkldnn_bf16_supported": lambda: isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool),
    "_linear_pointwise": lambda: torch.ops.mkldnn._linear_pointwise.default,
    "_reorder_linear_weight": lambda: torch.ops.mkldnn._reorder_linear_weight,
    "_to_copy": lambda: torch.ops.aten._to_copy.default(torch.ones(1), dtype=torch.half).dtype == torch.half,
    "_version": lambda: torch.zeros(1).add_(1)._version == 1,
    "hydra._internal": lambda: config_loader_impl.ConfigLoaderImpl(create_config_search_path(str(ROOT / "configs"))),
    "torch._dynamo.utils": lambda: counters["stats"]["unique_graphs"] >= 0,
    "torch.utils._python_dispatch": lambda: TorchDispatchMode,
    "torch.utils._pytree": lambda: tree_leaves([1, (2,)]) == [1, 2],
}  # fmt: skip
# not of a dependency: namedtuple's method, threading's lock, torch's C module
STANDARD = {"_asdict", "_is_owned", "_C"}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_attribute_is_there(name):
    """Several are read by `getattr` with a default, and would go unnoticed."""
    assert PRIVATE[name]()


def test_every_private_attribute_that_the_product_reads_is_tried_above():
    read = set()
    own = set(STANDARD)
    for module, path in MODULES.items():
        if module.startswith("tests"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute):
                (own if isinstance(node.ctx, ast.Store) else read).add(node.attr)
            elif isinstance(node, ast.Name | ast.arg):
                own.add(getattr(node, "id", None) or getattr(node, "arg", None))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
            ):
                read.add(str(getattr(node.args[1], "value", "")))
            elif isinstance(node, ast.ImportFrom) and "._" in str(node.module):
                read.add(re.sub(r"(hydra\._internal).*", r"\1", node.module))
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SETTING":
                read.add(node.value.value)
    found = {
        name for name in read - own if any(re.match("_[^_]", part) for part in name.split("."))
    }
    assert found == PRIVATE.keys()
