"""The contract of a fuser, and the frozen answers it gives.

A fuser is asked twice. `match` sees one site of every kind (class, children, shapes) and says whether the class has the
pattern; `rewrite` sees each instance of that kind and fills in its numbers. Both answer with a value or with a Miss
that says why not and where; nothing answers a bare None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import nn

from tfbackend.layerspecs import LayerSpec
from tfbackend.serving import ServingSpec
from tfbackend.source.edits import Edit

if TYPE_CHECKING:
    from tfbackend.graph.kinds import Kind
    from tfbackend.graph.observe import Observation
    from tfbackend.graph.tracing import Trace
    from tfbackend.source.forward import ForwardSource


@dataclass(frozen=True)
class Miss:
    """A pattern that was not applied.

    Attributes:
        fuser: who answers.
        qualname: the site, relative to the base model.
        reason: why not, as a sentence a user can act on.
        place: "file.py:line" of the Transformers source that decided it.
        near: True where the site looked like the pattern; the others are of no interest to a user.
    """

    fuser: str
    qualname: str
    reason: str
    place: str = ""
    near: bool = True

    def __str__(self) -> str:
        return f"{self.qualname}: {self.fuser}: {self.reason}" + (f" ({self.place})" if self.place else "")


@dataclass(frozen=True)
class WeightEntry:
    """Where a module's tensors go: checkpoint module `source` becomes shard `shard` of `target` (None: the whole).

    Both are relative to the site, "" for the site itself. It speaks of modules and not of parameters, so that a bias,
    or the scales and zero points of a quantized checkpoint, follow the weight they belong to. `transposed` says that
    the checkpoint's weight is [in, out] and the target's [out, in].
    """

    source: str
    target: str
    shard: str | int | None = None
    transposed: bool = False

    @property
    def place(self) -> str:
        """The target and, behind it, the shard, as one name."""
        return self.target if self.shard is None else f"{self.target}.{self.shard}"


@dataclass(frozen=True)
class Rewrite:
    """One change of one site, complete: `inspect` prints it, `proof` runs it, `apply` builds it, weights read it.

    Attributes:
        qualname: the site, relative to the base model.
        fuser: who made it.
        layer: what replaces the site as a whole, or None where the site stays and its forward is edited.
        children: new child name -> what to build there.
        removes: children of the site that go, because a new child carries their weights.
        attributes: plain values to set on the site; a tuple named `<child>_sizes` is scaled to the rank by apply.
        edits: changes to the source text of the site's forward.
        weights: how the tensors of the removed children reach the new ones.
        styles: tensor-parallel style, by child, of linears that this rewrite relies on but leaves to the linear fuser.
        claims: children of the site ("" for the site itself) that no other rewrite may touch.
        outputs: how many of the tensors that the site returns, from the first, are to stay; None for all. The others
            were seen to be of no use to anyone.
        captured: what the pattern's roles were bound to, for the reader.
        summary: one line.
        unread: children of the site ("" for the site itself) that go with no one to carry their weights, for nothing
            is computed from them any more.
    """

    qualname: str
    fuser: str
    summary: str
    layer: LayerSpec | None = None
    children: tuple[tuple[str, LayerSpec], ...] = ()
    removes: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    edits: tuple[Edit, ...] = ()
    weights: tuple[WeightEntry, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()
    claims: frozenset[str] = frozenset()
    outputs: int | None = None
    captured: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """A pattern found in a kind of site: roles bound to child names or values, and the edits its forward needs."""

    roles: Mapping[str, Any]
    edits: tuple[Edit, ...] = ()
    claims: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Site:
    """A module of the meta model as a fuser sees it.

    Attributes:
        qualname: path relative to the base model.
        module: the instance, on meta; read, never changed.
        kind: what it shares with every site of the same class, children and shapes; holds the trace and the source.
        observation: what the whole-model run on meta saw.
        serving: what the engine asks for.
        vocabulary: path of the vocabulary embedding, relative to the base model.
        tp_style: tensor-parallel style by module path, from the model's own plan.
        taken: children that earlier fusers of the tuple have claimed.
    """

    qualname: str
    module: nn.Module
    kind: Kind
    observation: Observation
    serving: ServingSpec
    vocabulary: str = ""
    tp_style: Mapping[str, str] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()

    @property
    def trace(self) -> Trace:
        """Graph of the forward over meta values, children as leaves."""
        return self.kind.trace

    @property
    def source(self) -> ForwardSource | str:
        """Source of the forward, or why there is none to edit."""
        return self.kind.source

    def child(self, name: str) -> nn.Module:
        return self.module.get_submodule(name)

    @property
    def inside(self) -> frozenset[str]:
        """Paths of all modules in the site, its own ("") among them: what is claimed where all of it goes."""
        return frozenset(name for name, _ in self.module.named_modules())

    def path(self, name: str) -> str:
        return f"{self.qualname}.{name}" if self.qualname else name

    def place(self) -> str:
        """'file.py:line' of the forward, "" where it has no source."""
        return "" if isinstance(self.source, str) else self.source.place()


class Fuser(Protocol):
    """One pattern. Stateless: everything it learns is in its answers."""

    name: ClassVar[str]

    def match(self, site: Site) -> Match | Miss:
        """Whether the class of this site has the pattern."""
        ...

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        """The change of this very site, or why this instance cannot have it."""
        ...
