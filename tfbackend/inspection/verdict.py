"""Whether a model serves, serves with losses, or does not serve, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tfbackend.errors import UnsupportedModelError
from tfbackend.inspection.accounts import Accounts
from tfbackend.inspection.classes import ServedClass
from tfbackend.inspection.diffs import fold_paths
from tfbackend.inspection.headers import Headers
from tfbackend.inspection.layout import ServedParameter
from tfbackend.inspection.memory import ALLOWANCE, Memory
from tfbackend.inspection.sizes import bytes_text
from tfbackend.inspection.tree import KEPT, Site
from tfbackend.layerspecs import REPLICATED, FixedRopeSpec, LinearSpec
from tfbackend.plan import Plan
from tfbackend.serving import ServingSpec

SERVES, WITH_LOSSES, NOT_SERVED = 0, 1, 2
WORDS = {SERVES: "serves", WITH_LOSSES: "serves with losses", NOT_SERVED: "does not serve"}
UNEVEN = "do not divide over the tensor-parallel ranks."
_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """Something that stands in the way of serving, or that is lost.

    Attributes:
        what: a sentence.
        where: the sites, parameters or tensors, folded.
        remedy: what to do, "" where nothing can be done.
        place: "file.py:line" of the Transformers source, "" for none.
    """

    what: str
    where: tuple[str, ...] = ()
    remedy: str = ""
    place: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.where[:_SHOWN])
        more = f" and {len(self.where) - _SHOWN} more" if len(self.where) > _SHOWN else ""
        head = f"{shown}{more}: {self.what}" if shown else self.what
        return head + (f" ({self.place})" if self.place else "") + (f". {self.remedy}" if self.remedy else "")


def grouped(items: Iterable[tuple[tuple[str, str, str], str]]) -> Iterator[Finding]:
    """Findings of ((what, remedy, place), path) pairs: one for each what, its paths folded."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, path in items:
        groups.setdefault(key, []).append(path)
    for (what, remedy, place), paths in groups.items():
        yield Finding(what, tuple(fold_paths(paths)), remedy, place)


def refusal_findings(refusals: Sequence[UnsupportedModelError], plan: Plan) -> Iterator[Finding]:
    """One finding for each different refusal. Its reason is taken from the Miss it stands on, where there is one."""
    misses = {(m.qualname, str(m)): m for m in plan.misses}
    items = []
    for error in refusals:
        if error.summary.endswith(UNEVEN):
            continue  # the layout says the same of the parameter, and which numbers of ranks divide
        path, found = error.where or plan.architecture, error.found or ""
        miss = misses.get((path, found))
        reason = f"{miss.fuser}: {miss.reason}" if miss else found.replace(f"{path}: ", "")
        what = f"{error.summary.rstrip('.')}: {reason}" if reason else error.summary.rstrip(".")
        items.append(((what, error.remedy or "", miss.place if miss else ""), path))
    yield from grouped(items)


def class_findings(served: ServedClass, serving: ServingSpec) -> Iterator[Finding]:
    """What the serving class cannot do and is asked for."""
    if not served.ours:
        remedy = "vLLM's own class of that name may serve it: `vllm serve ... --model-impl transformers`"
        yield Finding(f"vLLM would look for {served.name}, which tfbackend does not have yet", remedy=remedy)
        return
    if serving.pp_size > 1 and not served.supports("SupportsPP"):
        yield Finding(f"{served.name} has no pipeline parallelism", remedy="Use --tp instead of --pp")
    if serving.quantization and not served.supports("SupportsQuant"):
        yield Finding(f"{served.name} takes no quantized checkpoints", remedy="Give an unquantized one")


def layout_findings(parameters: Sequence[ServedParameter], good: Sequence[int]) -> Iterator[Finding]:
    """What does not divide over the ranks."""
    remedy = f"Numbers of ranks that divide everything: {', '.join(map(str, good))}" if good else ""
    yield from grouped(((p.problem, remedy, ""), p.name) for p in parameters if p.problem)


def weight_findings(headers: Headers | None, accounts: Accounts | None) -> Iterator[Finding]:
    """What keeps the checkpoint from loading."""
    if headers is not None:
        yield from (Finding(problem) for problem in headers.problems)
    if accounts is None:
        return
    yield from grouped(
        (
            (
                f"would stay unfilled: the checkpoint lacks {_stem(gap.wanted)}"
                if gap.wanted
                else "would stay unfilled",
                "Check that every file of the checkpoint is there",
                "",
            ),
            gap.place,
        )
        for gap in accounts.gaps
    )
    for outcome in ("unexpected", "duplicate", "misfit"):
        yield from grouped(
            ((entry.note, "", ""), entry.tensor.name) for entry in accounts.entries if entry.outcome == outcome
        )


def _stem(name: str) -> str:
    return f"*.{'.'.join(name.split('.')[-2:])}"


def memory_findings(memory: Memory) -> Iterator[Finding]:
    """Too little memory for the weights, or for one request."""
    fit = memory.fit
    if fit is not None and fit.longest == 0 and any(s.cache.groups or s.state for s in memory.stages):
        yield Finding(
            f"{bytes_text(memory.weights)} of weights a rank leave no room for a request: {bytes_text(fit.gpu)} at "
            f"{fit.utilisation:.0%}, less {bytes_text(ALLOWANCE)} for activations",
            remedy="Use more ranks (--tp), a larger GPU or a quantized checkpoint",
        )


def losses(plan: Plan, tree: Site, serving: ServingSpec) -> Iterator[Finding]:
    """What is slower, or other than in Transformers, though the model serves."""
    if plan.alone:
        yield Finding(f"each prompt is run by itself, in Transformers' own code: {'; '.join(plan.alone)}")
    yield from grouped(
        ((f"not fused, {miss.fuser}: {miss.reason}", "", miss.place), miss.qualname) for miss in plan.misses
    )
    yield from grouped(
        ((f"unproven: {text.partition(': ')[2]}", "Run it again: proofs are remembered", ""), text.partition(":")[0])
        for text in plan.unproven
    )
    for rewrite in plan.rewrites:
        if isinstance(rewrite.layer, FixedRopeSpec) and not rewrite.layer.exact:
            yield Finding(str(rewrite.layer), (rewrite.qualname,), "Choose --max-model-len within the original context")
    for path, site in tree.walk_named():
        if site.state == KEPT and _is_heavy(site):
            yield Finding(f"{site.cls} runs as Transformers wrote it, whole on every rank", (path,), "", site.place)
    if serving.tp_size > 1:
        yield from grouped(
            (("computed whole on every rank: the model's class names no way to share it", "", ""), r.qualname)
            for r in plan.rewrites
            if isinstance(r.layer, LinearSpec) and r.layer.style == REPLICATED and _is_wide(r.layer)
        )


def _is_heavy(site: Site) -> bool:
    """Whether a kept module holds a matrix; vectors cost nothing."""
    return any(len(shape) > 1 and min(shape[-2:]) > 16 for _, shape, _ in site.parameters)


def _is_wide(spec: LinearSpec) -> bool:
    return min(spec.in_features, spec.out_features) > 512
