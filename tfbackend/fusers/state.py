"""A mixer that keeps state between calls -> the same mixer, run with the state of each request.

    def forward(self, hidden_states, cache_params=None, ...):      def forward(self, hidden_states, ...):
        ...                                                   ->       return self.state(hidden_states)

The layer runs the mixer's own forward on its own parameters, each request with its own tensors of state. Which module
it is, what it keeps and in which shapes is seen in a run on meta: with Transformers' cache (graph/stateful.py), or, of
a mixer that asks no such cache, in what the model hands it where it is to keep state (graph/stateheld.py). How it may
be fed is tried out on random numbers (graph/statetrial.py), which is also the proof.
"""

from __future__ import annotations

from typing import ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.kinds import tampered
from tfbackend.graph.stateful import find_state
from tfbackend.graph.stateheld import find_held
from tfbackend.graph.statetrial import tried
from tfbackend.source.edits import Edit
from tfbackend.source.forward import ForwardSource
from tfbackend.statespec import StateSpec

LAYER = "state"
"""The child that keeps the state and runs the mixer."""


class StateFuser:
    name: ClassVar[str] = "state"

    def match(self, site: Site) -> Match | Miss:
        calls = site.observation.calls.get(site.qualname, [])
        asked = find_state(site.module, calls)
        found = [asked] if isinstance(asked, StateSpec) else find_held(site.module, site.qualname, site.observation)
        if not found:
            return self._miss(site, str(asked) or "asks no cache to keep anything", near=bool(asked))
        if problem := site.serving.stateless or tampered(site.module):
            return self._miss(site, problem)
        if isinstance(site.source, str):
            return self._miss(site, site.source)
        if hasattr(site.module, LAYER):
            return self._miss(site, f"already has an attribute called {LAYER}")
        problem = ""
        for candidate in found:
            spec = tried(site.module, calls[0], candidate)
            if isinstance(spec, StateSpec):
                given = ", ".join(name for name in (spec.hidden, spec.positions) if name)
                return Match({"spec": spec}, (body_edit(site.source, given, self.name),), site.inside | {LAYER})
            problem = problem or spec
        return self._miss(site, problem)

    def _miss(self, site: Site, reason: str, *, near: bool = True) -> Miss:
        return Miss(self.name, site.qualname, reason, site.place(), near)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec = match.roles["spec"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=((LAYER, spec),),
            edits=match.edits,
            claims=match.claims,
            captured=(("tokens", spec.hidden), ("cache", spec.cache)),
        )


def body_edit(source: ForwardSource, given: str, by: str) -> Edit:
    """The whole body of the forward, but for a docstring, gives way to a call of the layer."""
    start, end = source.offsets(source.body[0])[0], source.offsets(source.body[-1])[1]
    return Edit(start, end, f"return {source.me}.{LAYER}({given})", by)
