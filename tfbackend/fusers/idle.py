"""A module that nothing follows from that is asked for -> nothing.

    pooled = self.pooler(hidden)      of which an embedding model gives only `hidden`

Its weights are not read, whether the checkpoint has them or not.
"""

from __future__ import annotations

from typing import ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.standinspec import IdleSpec


class IdleFuser:
    name: ClassVar[str] = "idle"

    def match(self, site: Site) -> Match | Miss:
        if site.qualname not in site.observation.idle:
            return Miss(self.name, site.qualname, "something follows from it", near=False)
        return Match({}, claims=site.inside)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec = IdleSpec()
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            layer=spec,
            claims=match.claims,
            unread=("",),
        )
