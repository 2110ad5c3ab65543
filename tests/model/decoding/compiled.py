"""Compiles Triton kernels for GPUs that are not there: the interpreter accepts what the compiler refuses.

Run as a program by `compile_for`, in a process without the interpreter. Standard input: a list of [module, function,
types by argument (constexpr for those in `fixed`), fixed values, arguments that are multiples of 16, options,
compute capability].
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ARCHITECTURES = {80: "sm_80", 86: "sm_86", 90: "sm_90a"}
ROOT = Path(__file__).resolve().parents[3]
SHARED = 99 << 10  # bytes a program: what compute capability 8.6 and 8.9 offer


def compile_for(cases: list[list[Any]], folder: Path) -> list[dict[str, Any]]:
    """Of each case: name, registers, spilled (bytes), shared (bytes). Raises AssertionError if one does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(folder / "kernel.ptx")]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(cases), env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _compile(module, function, types, fixed, aligned, options, capability, ptx):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), function)
    names = kernel.arg_names
    types = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    at = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned and n not in fixed}
    source = ASTSource(kernel, types, {n: fixed[n] for n in names if n in fixed}, at)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    Path(ptx).write_text(done.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [assembler, "-v", f"-arch={ARCHITECTURES[capability]}", ptx, "-o", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", told)]
    registers = re.search(r"Used (\d+) registers", told)
    return {
        "name": function,
        "registers": int(registers[1]),
        "spilled": sum(spilled) if spilled else None,
        "shared": done.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps([_compile(*case, sys.argv[1]) for case in json.load(sys.stdin)]))
