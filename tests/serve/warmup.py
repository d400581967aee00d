"""What an engine on a CPU finds out anew in each process that compiles anything, found out once before the forks.

Importing this does it: the compiler that vLLM's sampler asks for is loaded, the vector instructions of the machine are
known, the sources that its cache is keyed by are hashed. It runs no tensor operation, so it starts no thread.
"""

import importlib

from torch._inductor import codecache, cpu_vec_isa

for _name in ("torch._inductor.compile_fx", "torch._inductor.graph", "torch._functorch.aot_autograd"):
    importlib.import_module(_name)
cpu_vec_isa.pick_vec_isa()
codecache.torch_key()
codecache.triton_key()
