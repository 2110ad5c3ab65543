"""How tokens are measured. Here stands only what one runs, `python -m evaluation.NAME`; the work is done in the rooms.

Imports `model/`, never the reverse.
"""

import re

from omegaconf import OmegaConf

# ${plain:NAME} in configs/: a name as part of a folder's name, without a path's slashes.
OmegaConf.register_new_resolver("plain", lambda name: re.sub(r"[^\w.-]+", "_", str(name)).strip("_."), replace=True)
