"""What tests ask of a live model. These run in the engine's process, so they are importable and return plain values."""

from typing import Any, NamedTuple

from tfbackend.nativespec import state_bytes
from tfbackend.statespec import StateSpec

_largest = 0


def watch_tokens(model: Any) -> None:
    """From now on remember the largest number of tokens that one forward was given."""
    model.register_forward_pre_hook(_note_tokens, with_kwargs=True)


def _note_tokens(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _largest
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    _largest = max(_largest, positions.shape[-1])


def largest_forward(_model: Any) -> int:
    """The largest number of tokens that one forward was given since ``watch_tokens``."""
    return _largest


def compiled_graphs(_model: Any) -> int:
    """How many graphs Dynamo has captured in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def seen_as_compiled(model: Any) -> tuple[int, bool]:
    """The graphs, and whether vLLM finds a compiled module in the model: else it captures no graphs of its pieces."""
    from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule

    return compiled_graphs(model), bool(has_compiled_submodule(model))


def parameter_count(model: Any) -> int:
    """How many numbers this rank's parameters hold."""
    return sum(parameter.numel() for parameter in model.parameters())


def query_heads(model: Any) -> int:
    """Query heads of all attention layers of this rank."""
    layers = model.vllm_config.compilation_config.static_forward_context.values()
    return sum(layer.num_heads for layer in layers if hasattr(layer, "num_heads"))


def model_class(model: Any) -> str:
    """The full name of the class that serves."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def attention_layers(model: Any) -> dict[str, list[str]]:
    """Path of a module with several attention layers -> their names, under which the engine keeps their caches."""
    found: dict[str, list[str]] = {}
    for path, module in model.model.named_modules():
        for name in getattr(module, "tfb_attention_layers", ()):
            found.setdefault(path, []).append(getattr(module, name).layer_name)
    return found


def cache_pages_and_misses(model: Any) -> tuple[set[str], tuple[str, ...]]:
    """Kinds of pages that the engine made its KV cache of, as the layers asked for and as they were given; and why what
    was not rewritten was not."""
    pages = set()
    for module in model.modules():
        if hasattr(module, "get_kv_cache_spec"):
            spec = module.get_kv_cache_spec(model.vllm_config)
            held = module.kv_cache[0].numel() * module.kv_cache.element_size()
            assert held == spec.page_size_bytes, f"{type(spec).__name__}: {held} bytes in a page"
            dtype = str(spec.dtype).removeprefix("torch.")
            kind = f"{type(spec).__name__} {spec.num_kv_heads}x{spec.head_size} {dtype}"
            pages.add(f"{kind}, {spec.block_size} tokens of {held} bytes")
    misses = (f"{miss.fuser}: {miss.reason}" for miss in model.plan.misses)
    return pages, tuple(dict.fromkeys(misses))


class States(NamedTuple):
    """Bytes of a request over all layers, the largest forward since ``watch_tokens``, graphs that Dynamo captured, and
    what each layer is."""

    nbytes: int
    largest_forward: int
    graphs: int
    layers: tuple[str, ...] = ()


def states(model: Any) -> States:
    """What is asked of a live model that keeps state."""
    layers = [module for module in model.modules() if hasattr(module, "states")]
    assert layers
    config, total = model.vllm_config, 0
    for layer in layers:
        told = state_bytes(layer.spec, config.parallel_config.tensor_parallel_size, config.model_config.dtype.itemsize)
        held = [pages[0].numel() * pages.element_size() for pages in layer.states]
        if isinstance(layer.spec, StateSpec):
            held = [layer.kv_cache[0].shape[1]]
            assert [tuple(pages.shape[1:]) for pages in layer.states] == [state.shape for state in layer.spec.states]
        assert sum(held) == told, f"{held} bytes in a page, the plan says {told}"
        total += told
    names = tuple(dict.fromkeys(type(layer).__name__ for layer in layers))
    return States(total, _largest, compiled_graphs(model), names)


def spoil_states(model: Any) -> None:
    """Let every page of state hold what is no number."""
    spoiled = [pages.fill_(float("nan")) for m in model.modules() if hasattr(m, "states") for pages in m.states]
    assert spoiled


def lose_states(model: Any) -> None:
    """Let every step find zeros for states."""
    model.register_forward_pre_hook(_clear_states)


def _clear_states(model: Any, _: Any) -> None:
    for module in model.modules():
        for pages in getattr(module, "states", ()):
            pages.zero_()


class Distances(NamedTuple):
    """What layers with a bias by distance there are -> how many; the largest forward since ``watch_tokens``, and graphs
    that Dynamo captured."""

    layers: dict[str, int]
    largest_forward: int
    graphs: int


def distances(model: Any) -> Distances:
    """What is asked of a live model that is given biases by distance."""
    found: dict[str, int] = {}
    for path, spec in model.plan.attention:
        layer = model.model.get_submodule(path).attn
        assert type(layer).__name__ == "DistanceBiasedAttention"
        assert layer.kv_cache.numel()
        kind = f"window {layer.rule.window}, {spec.extent} distances"
        found[kind] = found.get(kind, 0) + 1
    return Distances(found, _largest, compiled_graphs(model))


def lose_distances(model: Any) -> None:
    """Let every table of biases by distance be zeros."""
    for path, spec in model.plan.attention:
        assert spec.distance_bias
        model.model.get_submodule(path).attn.register_forward_pre_hook(_clear_bias, with_kwargs=True)


def _clear_bias(_: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"distance_bias": kwargs["distance_bias"] * 0}


def fixed_ropes(model: Any) -> list[tuple[bool, str]]:
    """(whether it is exact, what the plan says) of every rotary embedding whose frequencies the plan holds still."""
    rewrites = [rewrite for rewrite in model.plan.rewrites if rewrite.fuser == "fixed_rope"]
    return [(rewrite.layer.exact, rewrite.summary) for rewrite in rewrites]


def rewrites_by_fuser(model: Any) -> dict[str, int]:
    """How many rewrites of each fuser the plan has."""
    return dict(model.plan.counts)


def lose_slopes(model: Any) -> None:
    """Let every ALiBi slope be 0."""
    for module in model.modules():
        if getattr(getattr(module, "impl", None), "alibi_slopes", None) is not None:
            module.impl.alibi_slopes = module.impl.alibi_slopes * 0


def lose_windows(model: Any) -> None:
    """Let every token see all before it."""
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl.sliding_window = -1


def numbered_modules(model: Any) -> list[str]:
    """Paths of the modules that number tokens themselves and are told the positions; none is left with those of a
    call."""
    known = {path: module for path, module in model.model.named_modules() if hasattr(module, "tfb_positions")}
    assert all(module.tfb_positions is None for module in known.values()), "positions outlive their call"
    return list(known)
