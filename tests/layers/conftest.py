"""vLLM's layers ask for a distributed environment and a config; one process is enough."""

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel


@pytest.fixture(scope="module", autouse=True, params=["all", "none"], ids=["kernels", "plain"])
def one_rank(tmp_path_factory, request):
    """With vLLM's own kernels, as in an eager engine, and in plain torch, as in one that compiles."""
    rendezvous = tmp_path_factory.mktemp("dist") / "init"
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=[request.param]))):
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{rendezvous}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    """As the engine does, layers are built with the model's dtype as torch's default."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)
