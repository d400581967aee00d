"""A mixture-of-experts block as a whole -> one layer that routes, runs its experts and adds a shared expert.

    _, weights, ids = self.gate(x); return self.experts(x, ids, weights) + self.shared_expert(x)    ->    self.moe(x)

What the block does is found by running it, see routers. A block that does anything else keeps its forward, and its
experts alone are replaced.
"""

from __future__ import annotations

from typing import ClassVar

from torch import fx, nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.experts import LIVE, read_experts
from tfbackend.fusers.linears import merged_name
from tfbackend.fusers.products import linear_shape
from tfbackend.fusers.routers import BlockReading, beyond_hidden, read_block
from tfbackend.graph.interface import has_experts_interface
from tfbackend.graph.tracing import trace
from tfbackend.layerspecs import ROWWISE_PARTIAL
from tfbackend.moespec import MoESpec
from tfbackend.source.edits import Edit
from tfbackend.source.forward import ForwardSource


class MoEFuser:
    name: ClassVar[str] = "moe"

    def match(self, site: Site) -> Match | Miss:
        found = [name for name, child in site.module.named_children() if has_experts_interface(child)]
        if not found:
            return Miss(self.name, site.qualname, "has no routed experts", near=False)
        answer = self._read(site, found)
        if isinstance(answer, str):
            return Miss(self.name, site.qualname, f"its experts alone are replaced: {answer}", site.place())
        return answer

    def _read(self, site: Site, found: list[str]) -> Match | str:
        source, experts = site.source, found[0]
        if len(found) > 1 or isinstance(source, str):
            return source if isinstance(source, str) else f"has the experts {', '.join(found)}"
        spec = read_experts(site, site.child(experts), site.path(experts))
        if isinstance(spec, str) or not spec.kernel:
            return spec if isinstance(spec, str) else "vLLM has no kernel for them here"
        reading = read_block(site, experts, spec.top_k)
        if isinstance(reading, str):
            return reading
        gone = _gone(site.module, experts, reading)
        if isinstance(gone, str):
            return gone
        out = _last_linear(site, reading.shared) if reading.shared else ""
        # Ranks that share out the tokens of the experts may not share out the insides of what runs beside them.
        apart = site.serving.sequence_parallel_moe
        beside = ("", "", "") if apart else (reading.shared, reading.shared_gate, out)
        whole = MoESpec(spec, reading.router, *beside)
        name = merged_name(site, "moe")
        claims = {path for child in gone for path in _paths(site.module, child)}
        beyond = beyond_hidden(site) or 0
        roles = {
            "beyond": beyond,
            "spec": whole,
            "name": name,
            "tensors": reading.tensors,
            "experts": experts,
            "gone": gone,
        }
        return Match(roles, (_edit(source, name, reading, beyond, apart=apart),), frozenset(claims))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        roles = match.roles
        spec, name, experts = roles["spec"], roles["name"], roles["experts"]
        own = [n for n, _ in site.child(experts).named_parameters()]
        weights = [WeightEntry(f"{experts}.{n}", f"{name}.runner.routed_experts.{LIVE[n]}") for n in own]
        weights += [WeightEntry(path, f"{name}.{_PLACES[role]}") for role, path in roles["tensors"].items()]
        styles = ((spec.shared_out, ROWWISE_PARTIAL),) if spec.shared_out else ()
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=((name, spec),),
            removes=roles["gone"],
            edits=match.edits,
            weights=tuple(weights),
            styles=styles if site.serving.tp_size > 1 else (),
            claims=match.claims,
            outputs=1 if roles["beyond"] else None,
            captured=tuple(roles["tensors"].items()),
        )


_PLACES = {"weight": "runner.gate.weight", "bias": "runner.gate.bias", "correction": "correction"}
"""Role of a router's tensor -> where the layer has it."""


def _gone(module: nn.Module, experts: str, reading: BlockReading) -> tuple[str, ...] | str:
    """Children and tensors of the block that its new layer makes superfluous, each gone with all it holds."""
    gone = [experts]
    gone += [path.partition(".")[0] for path in reading.tensors.values()]
    kept = {reading.shared, reading.shared_gate, reading.after, *gone}
    for name, child in module.named_children():
        if name not in kept and [*child.parameters(), *child.buffers()]:
            return f"{name} has a part in it that is not known"
    return tuple(dict.fromkeys(gone))


def _paths(module: nn.Module, child: str) -> list[str]:
    inside = module._modules.get(child)
    if inside is None:
        return [child]
    return [f"{child}.{path}" if path else child for path, _ in inside.named_modules()]


def _last_linear(site: Site, shared: str) -> str:
    """The linear that gives what the shared expert gives, relative to the site; "" if there is none.

    One with a bias is none: ranks that leave its sum to others would each have added it.
    """
    calls = site.observation.calls.get(f"{site.kind.first}.{shared}", [])
    if len(calls) != 1:
        return ""
    module = site.child(shared)
    traced = trace(module, *calls[0])
    last = traced.output
    if not traced.complete or not isinstance(last, fx.Node) or last.op != "call_module":
        return ""
    name = str(last.target)
    shape = linear_shape(module.get_submodule(name))
    return f"{shared}.{name}" if shape is not None and not shape.bias else ""


def _edit(source: ForwardSource, name: str, reading: BlockReading, beyond: int, *, apart: bool) -> Edit:
    """The whole body of the forward as one call, and None for each output that nobody reads."""
    tree, me = source.tree, source.me
    x = [*tree.args.posonlyargs, *tree.args.args][1].arg
    call = f"{me}.{name}({x})"
    if apart and reading.shared:
        gate = f"{me}.{reading.shared_gate}({x}).sigmoid() * " if reading.shared_gate else ""
        call += f" + {gate}{me}.{reading.shared}({x})"
    call = f"{me}.{reading.after}({call})" if reading.after else call
    start, end = source.offsets(tree.body[0])[0], source.offsets(tree.body[-1])[1]
    return Edit(start, end, f"return {', '.join([call, *['None'] * beyond])}", MoEFuser.name)
