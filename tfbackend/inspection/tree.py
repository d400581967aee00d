"""The module tree of a plan: what each module becomes, folded where modules repeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.inspection.layout import ServedParameter
from tfbackend.inspection.sizes import ranges
from tfbackend.meta import MetaModel
from tfbackend.plan import Plan
from tfbackend.proof import needs_no_proof
from tfbackend.source.forward import SourceError, forward_source
from tfbackend.weights.names import join

REWRITTEN, MERGED, KEPT, REFUSED, PLAIN = "rewritten", "merged", "kept", "refused", "plain"
PROVEN, UNPROVEN, AS_IS = "proven", "unproven", "not needed"


@dataclass(frozen=True)
class Site:
    """A module, or several that are the same.

    Attributes:
        name: its own name, "0-29" where folded.
        path: of the first of them, relative to the base model; "lm_head" for the head.
        cls: its Transformers class.
        state: "rewritten"; "merged" into a new child of its parent; "kept" as it is although it has parameters;
            "refused": a pattern was found and not applied; "plain": nothing to rewrite.
        becomes: what it turns into, one line for each rewrite.
        proof: "proven", "unproven", "not needed" (a layer for the same layer), or "" where it is not rewritten.
        misses: (fuser, reason, file:line) of each pattern that was not applied.
        parameters: (name, shape, shape on a rank) of what it holds once served, by names below the site.
        place: "file.py:line" of its forward, "" where that has no source.
        count: how many modules this stands for.
        children: in the order in which the forward uses them.
    """

    name: str
    path: str
    cls: str
    state: str
    becomes: tuple[str, ...] = ()
    proof: str = ""
    misses: tuple[tuple[str, str, str], ...] = ()
    parameters: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    place: str = ""
    count: int = 1
    children: tuple[Site, ...] = field(default=())

    def walk(self) -> Iterator[Site]:
        """This site and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def walk_named(self, path: str = "") -> Iterator[tuple[str, Site]]:
        """(path with folded numbers, site) of all sites below this one: ("layers.0-29.mlp", ...)."""
        for child in self.children:
            named = join(path, child.name)
            yield named, child
            yield from child.walk_named(named)


class _Builder:
    def __init__(self, meta: MetaModel, plan: Plan, parameters: Sequence[ServedParameter]) -> None:
        self.plan = plan
        self.unproven = {text.partition(":")[0] for text in plan.unproven}
        self.misses: dict[str, list[Miss]] = defaultdict(list)
        for miss in plan.misses:
            self.misses[miss.qualname].append(miss)
        self.merged = {
            join(path, child): _taker(rewrite, child)
            for path, rewrites in plan.by_site.items()
            for rewrite in rewrites
            for child in rewrite.removes
        }
        self.held: dict[str, list[ServedParameter]] = defaultdict(list)
        sites = {name for name, _ in meta.base.named_modules()}
        for parameter in parameters:
            self.held[_site_of(parameter.name, sites)].append(parameter)

    def build(self, path: str, module: nn.Module) -> Site:
        children = [self.build(join(path, name), child) for name, child in _in_order(module)]
        rewrites = self.plan.by_site.get(path, ())
        misses = tuple((m.fuser, m.reason, m.place) for m in self.misses.get(path, ()))
        becomes = tuple(rewrite.summary for rewrite in rewrites)
        if path in self.merged:
            becomes = (self.merged[path],)
        shapes = tuple((p.name.removeprefix(f"model.{path}."), p.shape, p.rank_shape) for p in self.held.get(path, ()))
        return Site(
            name=path.rpartition(".")[2],
            path=path,
            cls=type(module).__name__,
            state=self._state(path, module, bool(misses)),
            becomes=becomes,
            proof=_proof(rewrites, path in self.unproven),
            misses=misses,
            parameters=shapes if path else (),
            place=_place(module),
            children=tuple(fold(children) if isinstance(module, nn.ModuleList) else children),
        )

    def _state(self, path: str, module: nn.Module, missed: bool) -> str:
        if path in self.plan.by_site:
            return REWRITTEN
        if path in self.merged:
            return MERGED
        if missed:
            return REFUSED
        return KEPT if list(module.parameters(recurse=False)) else PLAIN


def build_tree(meta: MetaModel, plan: Plan, parameters: Sequence[ServedParameter]) -> Site:
    """The tree of the base model, with the head as its last child."""
    builder = _Builder(meta, plan, parameters)
    root = builder.build("", meta.base)
    head = _head(meta, plan, parameters)
    return replace(root, name=meta.base_path or plan.architecture, children=(*root.children, *head))


def _head(meta: MetaModel, plan: Plan, parameters: Sequence[ServedParameter]) -> tuple[Site, ...]:
    if meta.head_path is None:
        return ()
    shapes = tuple(
        (p.name.removeprefix("lm_head."), p.shape, p.rank_shape) for p in parameters if p.name.startswith("lm_head.")
    )
    state = REWRITTEN if plan.head is not None else REFUSED
    what = f"{'tied ' if plan.tied else ''}head over the vocabulary, {plan.head}" if plan.head is not None else ""
    linear = meta.model.get_submodule(meta.head_path)
    return (
        Site(
            "lm_head",
            "lm_head",
            type(linear).__name__,
            state,
            (what,) if what else (),
            AS_IS if what else "",
            parameters=shapes,
        ),
    )


def _site_of(name: str, sites: set[str]) -> str:
    """The innermost module of the Transformers tree that holds a parameter of the served tree."""
    path = name.removeprefix("model.").rpartition(".")[0] if name.startswith("model.") else "?"
    while path and path not in sites:
        path = path.rpartition(".")[0]
    return path


def _taker(rewrite: Rewrite, child: str) -> str:
    """What takes the place of a child that goes: "shard q of qkv_proj"."""
    for entry in rewrite.weights:
        if entry.source == child:
            return f"{entry.target}" if entry.shard is None else f"shard {entry.shard} of {entry.target}"
    return f"part of {rewrite.fuser}"


def _proof(rewrites: Sequence[Rewrite], unproven: bool) -> str:
    if not rewrites:
        return ""
    if unproven:
        return UNPROVEN
    return AS_IS if all(needs_no_proof(rewrite) for rewrite in rewrites) else PROVEN


def _in_order(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children in the order in which the source of the forward names them, those that it does not name last."""
    children = list(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return children
    try:
        source = forward_source(type(module))
    except SourceError:
        return children
    first = {
        name: min((u.lineno, u.col_offset) for u in uses) for name, _ in children if (uses := source.self_uses(name))
    }
    return sorted(children, key=lambda child: first.get(child[0], (1 << 30, 0)))


def _place(module: nn.Module) -> str:
    if type(module).__module__.startswith("torch."):
        return ""
    try:
        return forward_source(type(module)).place()
    except SourceError:
        return ""


def fold(sites: Sequence[Site]) -> list[Site]:
    """Siblings that are the same but for their number become one; order is that of the first of each."""
    groups: dict[object, list[Site]] = {}
    for site in sites:
        groups.setdefault(_shape(site), []).append(site)
    made = []
    for same in groups.values():
        numbers = [int(site.name) for site in same if site.name.isdigit()]
        name = ranges(numbers) if len(numbers) == len(same) else same[0].name
        made.append(_times(replace(same[0], name=name), len(same)))
    return made


def _times(site: Site, count: int) -> Site:
    return replace(site, count=site.count * count, children=tuple(_times(child, count) for child in site.children))


def _shape(site: Site) -> object:
    """All that is shown of a site but its number and its path."""
    children = tuple((child.name, _shape(child)) for child in site.children)
    shown = (site.cls, site.state, site.becomes, site.proof, site.misses, site.parameters, site.place, site.count)
    return (*shown, children)


def states(root: Site) -> Counter[str]:
    """Modules by state."""
    found: Counter[str] = Counter()
    for site in root.walk():
        found[site.state] += site.count
    return found
