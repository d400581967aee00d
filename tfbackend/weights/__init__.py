"""Stage 4: where each tensor of a checkpoint goes, decided from the meta model and the plan alone.

    build_weight_map(model, plan)   names of the checkpoint -> places in the served module tree
    WeightMap.resolve(name)         one name: Placement, Gathered, Dropped or Unexpected
    WeightMap.stream(weights)       tensors in, (Placement, tensor) out, converted as Transformers converts them
    Ledger                          what became of each tensor and of each parameter

names.py knows how a name may be spelled, conversion.py runs Transformers' own conversions, drops.py holds the rules by
which a tensor may be left out, ties.py decides about shared parameters, mapping.py joins them, ledger.py keeps the
accounts. Nothing here imports vLLM; tfbackend.layers.loading hands the tensors to vLLM's layers.
"""

from tfbackend.weights.drops import RULES
from tfbackend.weights.ledger import Ledger
from tfbackend.weights.mapping import PlanLike, WeightMap, build_weight_map
from tfbackend.weights.outcomes import Dropped, Gathered, Outcome, Placement, Shard, Unexpected

__all__ = [
    "RULES",
    "Dropped",
    "Gathered",
    "Ledger",
    "Outcome",
    "Placement",
    "PlanLike",
    "Shard",
    "Unexpected",
    "WeightMap",
    "build_weight_map",
]
