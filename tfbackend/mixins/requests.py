"""Refuses requests that a model cannot do when they come in: later, an error would end the engine.

vLLM has no place where a model says so. This is the third patch of vLLM, set in the process that has the model. Where
that is the engine's own, `EngineCore.preprocess_add_request` looks at the request first, and vLLM makes of an error the
end of that request; where it is the user's, `InputProcessor.process_inputs` looks at it before anyone knows of it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

from tfbackend.alone import Limits
from tfbackend.errors import RequestError

_limits: dict[str, Limits] = {}
"""What may be asked of the models in this process, by the id that vLLM gives a config."""
_LIMITS = "request_limits"
"""Where an engine has those of its model: its config gets another id when it has shaken hands with its clients."""


def guard_requests(config: VllmConfig, limits: Limits) -> None:
    """From now on hold the requests for the model of this config against its limits."""
    _limits[config.instance_id] = limits
    _look_first(EngineCore, "preprocess_add_request", before=True)
    _look_first(InputProcessor, "process_inputs", before=False)


def ask_ranks(engine: EngineCore) -> None:
    """Hold the requests of an engine against what its model can do, also where that is in other processes."""
    config = engine.vllm_config
    if config.model_config.runner_type != "pooling":
        return
    if config.instance_id not in _limits:
        found = engine.model_executor.collective_rpc("apply_model", args=(limits_of_model,))
        limits = next((each for each in found if each is not None), None)
        if limits is None:
            return
        guard_requests(config, limits)
    vars(engine)[_LIMITS] = _limits[config.instance_id]


def limits_of_model(model: Any) -> Limits | None:
    """What may be asked of the model of a rank; None where it is not ours. A rank's config has an id of its own."""
    limits = getattr(model, "limits", None)
    return limits if isinstance(limits, Limits) else None


def _look_first(owner: Any, name: str, *, before: bool) -> None:
    """Let a method check the request: the one that it is given, `before` it does anything, or the one that it makes."""
    original = getattr(owner, name)
    if getattr(original, "checks_requests", False):
        return

    @wraps(original)
    def checking(self: Any, *args: Any, **keywords: Any) -> Any:
        limits = vars(self).get(_LIMITS) or _limits.get(self.vllm_config.instance_id)
        if before:
            check_request(limits, args[0] if args else keywords["request"])
        made = original(self, *args, **keywords)
        if not before:
            check_request(limits, made)
        return made

    vars(checking)["checks_requests"] = True
    setattr(owner, name, checking)


def check_request(limits: Limits | None, request: EngineCoreRequest) -> None:
    """Refuse a request that is outside the limits.

    Raises:
        RequestError: it is.
    """
    ids = request.prompt_token_ids
    if limits is None or ids is None or request.pooling_params is None:
        return
    told = (request.pooling_params.extra_kwargs or {}).get("compressed_token_type_ids")
    if problem := limits.problem(ids, told):
        raise RequestError("The request is refused.", where=request.request_id, found=problem)
