"""A module that picks the keys attention is told of -> nothing, within the length of context of which it picks all.

What it would be given for that it need not be given either, and its weights are not read.
"""

from __future__ import annotations

from typing import ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.kinds import tampered
from tfbackend.graph.selection import Selection
from tfbackend.standinspec import AllKeysSpec


class SelectionFuser:
    name: ClassVar[str] = "selection"

    def match(self, site: Site) -> Match | Miss:
        found = site.observation.selection
        if not isinstance(found, Selection) or site.qualname not in found.makers:
            return Miss(self.name, site.qualname, "picks no keys", near=False)
        if problem := tampered(site.module):
            return Miss(self.name, site.qualname, problem, site.place())
        return Match({"bound": found.bound}, claims=site.inside)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec, bound = AllKeysSpec(), match.roles["bound"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{spec}, in contexts of up to {bound} tokens",
            layer=spec,
            claims=match.claims,
            unread=("",),
        )
