"""How tokens are made: one engine (`decoding/`) and the methods in rooms by what they draft from.

Imports itself relatively and knows neither Hydra nor the harness, so that it can be vendored under another name.

From outside: any class by its file; `errors`, `files` and `tree_files` are everyone's.
"""

import logging

# Where torchao is installed transformers imports it, and it tells of every kernel that was not built for this machine.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
