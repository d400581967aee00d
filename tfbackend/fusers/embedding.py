"""The vocabulary embedding, scaled or not -> a vocabulary-parallel table.

class ScaledEmbedding(nn.Embedding): forward = super().forward(ids) * self.embed_scale
"""

from __future__ import annotations

from typing import ClassVar

from torch import fx, nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.query import name_of, through_casts, value_of
from tfbackend.layerspecs import EmbeddingSpec


class EmbeddingFuser:
    name: ClassVar[str] = "embedding"

    def match(self, site: Site) -> Match | Miss:
        module = site.module
        if not isinstance(module, nn.Embedding) or site.qualname != site.vocabulary:
            return Miss(self.name, site.qualname, "not the vocabulary embedding", near=False)
        if module.max_norm is not None:
            return Miss(self.name, site.qualname, "renormalises its rows (max_norm)", site.place())
        scale = 1.0 if type(module) is nn.Embedding else self._scale(site)
        if isinstance(scale, str):
            return Miss(self.name, site.qualname, scale, site.place())
        return Match(
            {"spec": EmbeddingSpec(module.num_embeddings, module.embedding_dim, scale)}, claims=frozenset({""})
        )

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec = match.roles["spec"]
        return Rewrite(
            site.qualname, self.name, f"{type(site.module).__name__}: {spec}", layer=spec, claims=match.claims
        )

    def _scale(self, site: Site) -> float | str:
        """The number that rows are multiplied by, as the traced forward does it."""
        trace = site.trace
        node = trace.output
        if not trace.complete or not isinstance(node, fx.Node):
            return f"its forward was traced only in part: {trace.ended}"
        node, scale = through_casts(node), 1.0
        while name_of(node) in ("mul", "__mul__", "__rmul__"):
            rows = [a for a in node.args if isinstance(a, fx.Node) and _holds_rows(a)]
            factors = [a for a in node.args if a not in rows]
            if len(rows) != 1 or len(factors) != 1:
                return "multiplies its rows by something that is not a number"
            factor = _number(site, factors[0])
            if isinstance(factor, str):
                return factor
            scale, node = scale * factor, through_casts(rows[0])
        return scale if name_of(node) == "embedding" else f"also does {name_of(node) or node.op}"


def _holds_rows(node: fx.Node) -> bool:
    return len(node.meta["val"].shape) == 3


def _number(site: Site, factor: object) -> float | str:
    if isinstance(factor, (int, float)):
        return float(factor)
    node = through_casts(factor) if isinstance(factor, fx.Node) else None
    if node is None or node.op != "get_attr":
        return "its scale is computed"
    tensor = dict(site.module.named_buffers()).get(str(node.target))
    if tensor is None or tensor.numel() != 1:
        return f"its scale {node.target} is not one number"
    if node.target not in site.module._non_persistent_buffers_set:
        return f"its scale {node.target} may come from the checkpoint"
    assert isinstance(factor, fx.Node)
    return float(tensor.to(value_of(factor).dtype))
