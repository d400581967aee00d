"""A rotary embedding that rescales with the longest position of each call -> the same with its frequencies held still.

A batch holds requests of many lengths and their keys stay in the cache, so "the length of this call" has no meaning in
an engine, and looking at it cannot be compiled. Where no context within max_model_len can make it rescale, holding it
still changes nothing; where one can, the frequencies are those of max_model_len, and the plan says that results differ.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.interface import rescales
from tfbackend.layerspecs import FixedRopeSpec


class FixedRopeFuser:
    name: ClassVar[str] = "fixed_rope"

    def match(self, site: Site) -> Match | Miss:
        if not rescales(site.module):
            return Miss(self.name, site.qualname, "does not rescale", near=False)
        return Match({"original": original_length(site.module)}, claims=frozenset({""}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        longest = site.serving.max_model_len
        spec = FixedRopeSpec(longest, exact=longest <= match.roles["original"])
        return Rewrite(site.qualname, self.name, str(spec), layer=spec, claims=match.claims)


def original_length(module: Any) -> int:
    """Longest context, in tokens, that the module's initial frequencies are for; 0 if it does not say."""
    config = module.config
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    lengths = [p.get("original_max_position_embeddings") for p in groups]
    known = [int(n) for n in lengths if n]
    return min(known) if known else int(getattr(module, "original_max_seq_len", 0) or 0)
