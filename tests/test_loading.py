"""Loading into vLLM's own layers: one process, CPU, no engine."""

import pytest
import torch
from torch import nn

vllm = pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.models.utils import PPMissingLayer  # noqa: E402

from tests.test_weights_models import SMALL, Plan, fused, on_meta, rewrite, tensors_of  # noqa: E402
from tfbackend.errors import (  # noqa: E402
    CheckpointError,
    MissingTensorError,
    ShapeMismatchError,
    UnexpectedTensorError,
)
from tfbackend.layers.loading import load  # noqa: E402
from tfbackend.weights import build_weight_map  # noqa: E402

FIELDS = {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}
Q = "model.layers.0.self_attn.q_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """A distributed environment of one process, which vLLM's parallel layers ask for."""
    rendezvous = tmp_path_factory.mktemp("dist") / "init"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{rendezvous}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


class Bare(nn.Module):
    """A module with children and nothing else."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def layer() -> nn.Module:
    return Bare(
        self_attn=Bare(
            qkv_proj=QKVParallelLinear(64, 32, 2, 1, bias=True),
            o_proj=RowParallelLinear(64, 64, bias=True),
        ),
        mlp=Bare(
            gate_up_proj=MergedColumnParallelLinear(64, [96, 96], bias=False),
            down_proj=nn.Linear(96, 64, bias=False),
        ),
        input_layernorm=RMSNorm(64),
        post_attention_layernorm=nn.RMSNorm(64),
    )


def served(*, tied: bool = False, head_first: bool = False) -> nn.Module:
    """The module tree of a two-layer llama: vLLM's layers, and two of torch's own."""
    head = ParallelLMHead(128, 64)
    layers = nn.ModuleList([layer(), layer()])
    base = Bare(embed_tokens=VocabParallelEmbedding(128, 64), layers=layers, norm=RMSNorm(64))
    if tied:
        head = head.tie_weights(base.embed_tokens)
    root = Bare(lm_head=head, model=base) if head_first else Bare(model=base, lm_head=head)
    for parameter in root.parameters():
        parameter.data.fill_(float("nan"))
    return root


def meta(**fields):
    return on_meta("llama", **(SMALL | FIELDS | fields))


@pytest.fixture(scope="module")
def model():
    return meta()


@pytest.fixture
def weight_map(model):
    return build_weight_map(model, Plan(fused()))


@pytest.fixture
def tensors(model):
    return tensors_of(model)


def test_every_parameter_is_filled_with_its_tensor(weight_map, tensors):
    root = served()
    loaded, ledger = load(root, weight_map, tensors.items())
    assert loaded == {name for name, _ in root.named_parameters()}
    attention = root.model.layers[1].self_attn
    prefix = "model.layers.1.self_attn"
    for leaf in ("weight", "bias"):
        stacked = torch.cat([tensors[f"{prefix}.{part}_proj.{leaf}"] for part in "qkv"])
        assert torch.equal(getattr(attention.qkv_proj, leaf), stacked)
    gate_up = torch.cat([tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(root.model.layers[0].mlp.gate_up_proj.weight, gate_up)
    assert torch.equal(root.model.layers[0].mlp.down_proj.weight, tensors["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(root.lm_head.weight, tensors["lm_head.weight"])
    assert not any(parameter.isnan().any() for parameter in root.parameters())
    assert "6 of them stacked, from 16 shards" in ledger.summary()


def test_float_checkpoint_is_cast(weight_map, tensors):
    root = served()
    load(root, weight_map, {name: tensor.bfloat16() for name, tensor in tensors.items()}.items())
    assert root.model.norm.weight.dtype == torch.float32
    assert torch.equal(root.model.norm.weight, tensors["model.norm.weight"].bfloat16().float())


def test_fused_on_disk_fills_all_shards(tensors):
    fields = SMALL | {"num_key_value_heads": 1}
    plan = Plan(
        tuple(
            r
            for i in range(2)
            for r in (
                rewrite(f"layers.{i}.self_attn", ("qkv_proj", "qkv_proj", None)),
                rewrite(f"layers.{i}.mlp", ("gate_up_proj", "gate_up_proj", None)),
            )
        )
    )
    phi3 = on_meta("phi3", **fields)
    root = served()
    for block in root.model.layers:
        block.self_attn.qkv_proj = QKVParallelLinear(64, 32, 2, 1, bias=False)
        block.self_attn.o_proj = RowParallelLinear(64, 64, bias=False)
    packed = tensors_of(phi3)
    load(root, build_weight_map(phi3, plan), packed.items())
    assert torch.equal(root.model.layers[0].self_attn.qkv_proj.weight, packed[QKV])


@pytest.mark.parametrize(
    "gone",
    [
        Q,
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.embed_tokens.weight",
    ],
)
def test_missing_tensor_stops_the_load(weight_map, tensors, gone):
    del tensors[gone]
    with pytest.raises(MissingTensorError) as caught:
        load(served(), weight_map, tensors.items())
    placement = weight_map.resolve(gone)
    assert caught.value.where == str(placement)
    assert caught.value.needed == gone
    assert caught.value.remedy


def test_renamed_tensor_stops_the_load(weight_map, tensors):
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop(Q)
    with pytest.raises(MissingTensorError, match=r"without one: model.layers.0.self_attn.query.weight"):
        load(served(), weight_map, tensors.items())


def test_extra_tensor_stops_the_load(weight_map, tensors):
    tensors["model.layers.2.self_attn.q_proj.weight"] = tensors[Q]
    with pytest.raises(UnexpectedTensorError, match=r"model.layers.2.self_attn.q_proj.weight has no place"):
        load(served(), weight_map, tensors.items())


def test_tensor_twice_stops_the_load(weight_map, tensors):
    tensors[f"_orig_mod.{Q}"] = tensors[Q]
    with pytest.raises(UnexpectedTensorError, match=rf"_orig_mod.{Q} and {Q} both go to {QKV} \(shard q\)"):
        load(served(), weight_map, tensors.items())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (Q, (128, 64)),  # too large: vLLM alone would cut it to size
        (Q, (32, 64)),
        (Q, (64, 65)),
        ("model.embed_tokens.weight", (129, 64)),
        ("model.embed_tokens.weight", (128, 1)),  # would be broadcast
        ("lm_head.weight", (64, 64)),
        ("model.norm.weight", (1,)),
        ("model.layers.0.mlp.down_proj.weight", (64, 97)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 128)),
    ],
)
def test_wrong_shape_stops_the_load(weight_map, tensors, name, shape):
    needed = tuple(tensors[name].shape)
    tensors[name] = torch.zeros(shape)
    with pytest.raises(ShapeMismatchError) as caught:
        load(served(), weight_map, tensors.items())
    assert (caught.value.found, caught.value.needed) == (str(shape), str(needed))
    assert name in caught.value.where
    assert str(weight_map.resolve(name)) in caught.value.where


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_wrong_kind_of_dtype_stops_the_load(weight_map, tensors, dtype):
    tensors[Q] = torch.zeros(64, 64).to(dtype)
    with pytest.raises(ShapeMismatchError, match=f"found {dtype}, needed torch.float32 or another float dtype"):
        load(served(), weight_map, tensors.items())


def test_all_wrong_shapes_are_told_at_once(weight_map, tensors):
    wrong = {name: torch.zeros(3, 3) for name in tensors}
    with pytest.raises(ShapeMismatchError, match=f"^{len(wrong)} tensors .*\n(.*\n)+.*and {len(wrong) - 10} more"):
        load(served(), weight_map, wrong.items())


def test_truncated_file_stops_the_load(weight_map, tensors, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])

    def read():
        yield "model.norm.weight", tensors["model.norm.weight"]
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    with pytest.raises(CheckpointError, match=r"after tensor model.norm.weight") as caught:
        load(served(), weight_map, read())
    assert "download" in caught.value.remedy


def test_parameter_the_map_knows_nothing_of_is_missing(weight_map, tensors):
    root = served()
    root.model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(MissingTensorError, match=r"model.extra"):
        load(root, weight_map, tensors.items())


def test_place_that_is_not_alive_is_unexpected(weight_map, tensors):
    root = served()
    del root.model.norm
    with pytest.raises(UnexpectedTensorError, match=r"model.norm.weight"):
        load(root, weight_map, tensors.items())


def test_saved_buffers_are_expected_and_others_are_not(tensors):
    model, root = meta(), served()
    for module in (model.model, root.model):
        module.register_buffer("steps", torch.zeros(2))
        module.register_buffer("scratch", torch.zeros(2), persistent=False)
    root.model.layers[0].register_buffer("_k_scale", torch.ones(()))
    weight_map = build_weight_map(model, Plan(fused()))
    loaded, _ = load(root, weight_map, [*tensors.items(), ("model.steps", torch.tensor([1.0, 2.0]))])
    assert root.model.steps.tolist() == [1, 2]
    assert "model.steps" in loaded
    with pytest.raises(MissingTensorError, match=r"model.steps"):
        load(root, weight_map, tensors.items())


# ---- pipeline stages ----


def test_other_stages_keep_their_tensors(weight_map, tensors):
    root = served()
    root.model.embed_tokens = PPMissingLayer()
    root.model.layers[0] = PPMissingLayer()
    loaded, ledger = load(root, weight_map, tensors.items())
    assert loaded == {name for name, _ in root.named_parameters()}
    assert len(ledger.as_dict()["dropped"]["other-stage"]["tensors"]) == 14


# ---- ties ----


@pytest.fixture(scope="module")
def tied_map():
    return build_weight_map(meta(tie_word_embeddings=True), Plan(fused(), tied=True))


@pytest.fixture
def tied_tensors():
    return tensors_of(meta(tie_word_embeddings=True))


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_head_needs_no_tensor(tied_map, tied_tensors, head_first):
    root = served(tied=True, head_first=head_first)
    loaded, _ = load(root, tied_map, tied_tensors.items())
    assert loaded == {name for name, _ in root.named_parameters(remove_duplicate=False)}
    assert root.lm_head.weight is root.model.embed_tokens.weight
    assert torch.equal(root.lm_head.weight, tied_tensors["model.embed_tokens.weight"])


def test_tied_head_alone_is_enough(tied_map, tied_tensors):
    root = served(tied=True)
    tied_tensors["lm_head.weight"] = tied_tensors.pop("model.embed_tokens.weight")
    load(root, tied_map, tied_tensors.items())
    assert torch.equal(root.model.embed_tokens.weight, tied_tensors["lm_head.weight"])


def test_tied_model_without_either_is_missing_the_embedding(tied_map, tied_tensors):
    del tied_tensors["model.embed_tokens.weight"]
    with pytest.raises(MissingTensorError) as caught:
        load(served(tied=True), tied_map, tied_tensors.items())
    assert caught.value.where == "model.embed_tokens.weight"


def test_equal_copy_keeps_the_tie(tied_map, tied_tensors):
    root = served(tied=True)
    tied_tensors["lm_head.weight"] = tied_tensors["model.embed_tokens.weight"].clone()
    _, ledger = load(root, tied_map, tied_tensors.items())
    assert root.lm_head.weight is root.model.embed_tokens.weight
    assert ledger.as_dict()["dropped"]["tied-copy"]["tensors"] == ["lm_head.weight"]


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("turn", [list, reversed], ids=["forward", "backward"])
def test_copy_that_differs_breaks_the_tie(tied_map, tied_tensors, head_first, turn):
    root = served(tied=True, head_first=head_first)
    embedding = tied_tensors["model.embed_tokens.weight"]
    tied_tensors["lm_head.weight"] = embedding + 1
    loaded, _ = load(root, tied_map, turn(list(tied_tensors.items())))
    assert torch.equal(root.model.embed_tokens.weight, embedding)
    assert torch.equal(root.lm_head.weight, embedding + 1)
    assert root.lm_head.weight.weight_loader.__self__ is root.lm_head
    assert loaded == {name for name, _ in root.named_parameters()}


def test_tie_that_cannot_be_broken_is_refused_by_name(tied_map, tied_tensors):
    root = served(tied=True)
    root.lm_head = root.model.embed_tokens
    tied_tensors["lm_head.weight"] = tied_tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(root, tied_map, tied_tensors.items())


# ---- quantized ----


class Fake:
    """A quantization method: a packed weight, one scale per shard, a zero point with a default."""


def quantize(linear: nn.Module) -> None:
    linear.quant_method = Fake()
    linear.weight = None
    linear.qweight = nn.Parameter(torch.zeros(linear.output_size, 8, dtype=torch.int32), requires_grad=False)
    linear.qweight.output_dim = 0
    linear.scales = nn.Parameter(torch.zeros(linear.output_size), requires_grad=False)
    linear.scales.output_dim = 0
    for parameter in (linear.qweight, linear.scales):
        parameter.weight_loader = linear.weight_loader


def served_quantized() -> nn.Module:
    root = served()
    quantize(root.model.layers[0].self_attn.qkv_proj)
    return root


@pytest.fixture
def quantized(model, tensors):
    root = served_quantized()
    del tensors[Q], tensors[Q.replace("q_proj", "k_proj")], tensors[Q.replace("q_proj", "v_proj")]
    for part, rows in (("q", 64), ("k", 32), ("v", 32)):
        prefix = f"model.layers.0.self_attn.{part}_proj"
        tensors[f"{prefix}.qweight"] = torch.full((rows, 8), ord(part), dtype=torch.int32)
        tensors[f"{prefix}.scales"] = torch.full((rows,), float(ord(part)))
    return root, build_weight_map(model, Plan(fused()), quantized=True), tensors


def test_quantized_tensors_reach_their_shards(quantized):
    root, weight_map, tensors = quantized
    load(root, weight_map, tensors.items(), quantized=True)
    qkv = root.model.layers[0].self_attn.qkv_proj
    assert qkv.qweight[:, 0].unique_consecutive().tolist() == [ord(part) for part in "qkv"]
    assert qkv.scales.unique_consecutive().tolist() == [ord(part) for part in "qkv"]


def test_packed_weight_is_required_and_its_scales_may_have_defaults(quantized):
    root, weight_map, tensors = quantized
    gone = Q.replace(".weight", ".qweight")
    with pytest.raises(MissingTensorError, match=r"qkv_proj.qweight \(shard q\)"):
        load(root, weight_map, {n: t for n, t in tensors.items() if n != gone}.items(), quantized=True)
    load(root, weight_map, {n: t for n, t in tensors.items() if not n.endswith("scales")}.items(), quantized=True)


def test_group_index_is_left_out_only_where_it_says_nothing(quantized):
    """AutoGPTQ always writes one; vLLM's layers have none, as their groups follow each other."""
    root, weight_map, tensors = quantized
    name = Q.replace(".weight", ".g_idx")
    tensors[name] = torch.arange(64) // 16
    _, ledger = load(root, weight_map, tensors.items(), quantized=True)
    assert ledger.as_dict()["dropped"]["ordered-group-index"]["tensors"] == [name]
    tensors[name] = tensors[name].flip(0)
    with pytest.raises(UnexpectedTensorError, match=r"q_proj.g_idx"):
        load(served_quantized(), weight_map, tensors.items(), quantized=True)


def test_bias_of_a_quantized_layer_is_required(quantized):
    root, weight_map, tensors = quantized
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    with pytest.raises(MissingTensorError, match=r"qkv_proj.bias \(shard k\)"):
        load(root, weight_map, tensors.items(), quantized=True)


def test_quantized_tensor_of_an_unquantized_layer_is_unexpected(quantized):
    root, weight_map, tensors = quantized
    tensors["model.layers.1.self_attn.q_proj.scales"] = torch.zeros(64)
    with pytest.raises(UnexpectedTensorError, match=r"layers.1.self_attn.q_proj.scales"):
        load(root, weight_map, tensors.items(), quantized=True)


def test_unquantized_part_of_a_quantized_model_is_held_to_its_shape(quantized):
    root, weight_map, tensors = quantized
    tensors["model.norm.weight"] = torch.zeros(65)
    with pytest.raises(ShapeMismatchError, match=r"model.norm.weight"):
        load(root, weight_map, tensors.items(), quantized=True)


def test_bias_of_zeros_is_dropped_and_another_is_not(quantized):
    root, weight_map, tensors = quantized
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    _, ledger = load(root, weight_map, tensors.items(), quantized=True)
    assert "zero-bias" in ledger.as_dict()["dropped"]
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(96)
    with pytest.raises(UnexpectedTensorError, match=r"up_proj.bias"):
        load(root, weight_map, tensors.items(), quantized=True)


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.k_proj.k_scale"])
def test_cache_scales_reach_the_attention_layer(quantized, name):
    root, weight_map, tensors = quantized
    attention = Bare()
    attention.quant_method = Fake()
    attention.k_scale, attention.v_scale = (nn.Parameter(torch.tensor(-1.0), requires_grad=False) for _ in range(2))
    root.model.layers[0].self_attn.attn = attention
    load(root, weight_map, tensors.items(), quantized=True)  # they have defaults
    load(root, weight_map, [*tensors.items(), (f"model.layers.0.{name}", torch.tensor(0.5))], quantized=True)
    assert attention.k_scale.item() == 0.5
    assert attention.v_scale.item() == -1.0


def test_cache_scale_that_nothing_uses_is_dropped(quantized):
    root, weight_map, tensors = quantized
    _, ledger = load(
        root, weight_map, [*tensors.items(), ("model.layers.0.self_attn.k_scale", torch.tensor(0.5))], quantized=True
    )
    assert "unused-cache-scale" in ledger.as_dict()["dropped"]
