"""Without a GPU, Triton's interpreter runs the kernels. The choice is read at Triton's first import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
