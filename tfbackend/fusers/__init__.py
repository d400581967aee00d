"""The ordered tuple of fusers. Order matters in one way: a fuser is told which children the ones before it claimed."""

from __future__ import annotations

from tfbackend.fusers.attention import AttentionFuser
from tfbackend.fusers.base import Fuser
from tfbackend.fusers.dense_experts import DenseExpertsFuser
from tfbackend.fusers.embedding import EmbeddingFuser
from tfbackend.fusers.experts import ExpertsFuser
from tfbackend.fusers.fixed_rope import FixedRopeFuser
from tfbackend.fusers.glu import GLUFuser
from tfbackend.fusers.grouped_linear import GroupedLinearFuser
from tfbackend.fusers.grown_table import GrownTableFuser
from tfbackend.fusers.idle import IdleFuser
from tfbackend.fusers.linear import LinearFuser
from tfbackend.fusers.linear_pair import LinearPairFuser
from tfbackend.fusers.looped_experts import LoopedExpertsFuser
from tfbackend.fusers.merged_column import MergedColumnFuser
from tfbackend.fusers.mla import MLAFuser
from tfbackend.fusers.moe import MoEFuser
from tfbackend.fusers.native import DeltaFuser, ShortConvFuser, SSDFuser
from tfbackend.fusers.norm import NormFuser
from tfbackend.fusers.packed_qkv import PackedQKVFuser
from tfbackend.fusers.qkv import QKVFuser
from tfbackend.fusers.rope import RopeFuser
from tfbackend.fusers.selection import SelectionFuser
from tfbackend.fusers.state import StateFuser

FUSERS: tuple[Fuser, ...] = (
    SSDFuser(),
    ShortConvFuser(),
    DeltaFuser(),
    StateFuser(),
    SelectionFuser(),
    IdleFuser(),
    MLAFuser(),
    LoopedExpertsFuser(),
    GroupedLinearFuser(),
    DenseExpertsFuser(),
    AttentionFuser(),
    QKVFuser(),
    PackedQKVFuser(),
    RopeFuser(),
    GLUFuser(),
    LinearPairFuser(),
    MergedColumnFuser(),
    FixedRopeFuser(),
    GrownTableFuser(),
    MoEFuser(),
    ExpertsFuser(),
    NormFuser(),
    EmbeddingFuser(),
    LinearFuser(),
)
