"""The checkpoint of a language model that ranks: a tensor that no file has is made of rows of its head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tfbackend import meta
from tfbackend.inspection.headers import Headers, TensorHeader
from tfbackend.meta import MetaModel
from tfbackend.plan import Plan
from tfbackend.plan_alone import unplanned
from tfbackend.reranker import classifier_weight, head_finder, reranker_of


def with_ranks(headers: Headers, config: Any, built: MetaModel, plan: Plan, *, trust_remote_code: bool) -> Headers:
    """The headers of a checkpoint, and that of the classifier's weight where the config names tokens for labels.

    Raises:
        UnsupportedModelError: no classifier can be made of the head.
    """
    reranker = reranker_of(config)
    if reranker is None or plan.classifier is None:
        return headers
    causal = meta.build(config, torch.float32, trust_remote_code=trust_remote_code)
    is_head = head_finder(causal, unplanned(causal))
    head = next((tensor for tensor in headers.tensors if is_head(tensor.name)), None)
    if head is None:
        return headers
    shape = (reranker.labels, *head.shape[1:]) if head.shape is not None else None
    made = TensorHeader(classifier_weight(built.model, plan.classifier), shape, "F32", head.file)
    return replace(headers, tensors=(*headers.tensors, made))
