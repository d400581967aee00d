"""Every exception that tfbackend raises on purpose.

TfbackendError
├── UserError (also a ValueError)       something outside tfbackend is wrong: a setting, a checkpoint, a version
│   ├── ConfigError                     a setting or a config.json value that cannot be served
│   ├── UnsupportedModelError           the model does something that tfbackend knows it would get wrong
│   ├── CheckpointError                 the files of a checkpoint do not load
│   │   ├── MissingTensorError          a parameter, or one shard of it, that no tensor filled
│   │   ├── UnexpectedTensorError       a tensor that no parameter takes and no rule drops
│   │   └── ShapeMismatchError          a tensor that has a taker, of another shape or dtype
│   ├── RequestError                    a request that the model cannot do
│   └── VersionError                    a release of vLLM or Transformers that is not supported
└── PlanConflictError (also an AssertionError)   two rewrites claim one site: a bug of ours, not of the user

A message answers four questions, each of them one keyword of the constructor:

    raise ShapeMismatchError(
        "The tensor does not fit its parameter.",
        where="model.layers.3.self_attn.qkv_proj.weight (shard q)",
        found="(576, 512) in model-00001-of-00002.safetensors",
        needed="(576, 576)",
        remedy="Check hidden_size in config.json, or download the checkpoint again.",
    )

    The tensor does not fit its parameter. Where: model.layers.3.self_attn.qkv_proj.weight (shard q).
    Found: (576, 512) in model-00001-of-00002.safetensors. Needed: (576, 576). Check hidden_size in config.json,
    or download the checkpoint again.        (one line in truth)
"""

from __future__ import annotations

_SENTENCE_ENDS = (".", "!", "?", ":", ";")


class TfbackendError(Exception):
    """Root of the tree. `str()` gives the whole message; the parts stay readable as attributes.

    Args:
        summary: what went wrong, as one sentence.
        where: the place: a module's qualified name, a tensor, a file, a flag.
        found: what was there.
        needed: what should have been there.
        remedy: what to do about it, as a sentence.

    An instance survives pickling, because vLLM carries exceptions from the engine process to the front end.
    """

    def __init__(
        self,
        summary: str = "",
        *,
        where: str | None = None,
        found: str | None = None,
        needed: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.summary = summary
        self.where = where
        self.found = found
        self.needed = needed
        self.remedy = remedy
        super().__init__(_compose(summary, where, found, needed, remedy))


class UserError(TfbackendError, ValueError):
    """Something outside tfbackend has to change. A ValueError, so that vLLM's own handlers show it as user input."""


class ConfigError(UserError):
    """A setting, a flag or a value of config.json that cannot be served."""


class UnsupportedModelError(UserError):
    """The model does something that tfbackend cannot serve faithfully, and so refuses by name."""


class CheckpointError(UserError):
    """The files of a checkpoint do not load completely."""


class MissingTensorError(CheckpointError):
    """A parameter, or one shard of a stacked parameter, was filled by no tensor of the checkpoint."""


class UnexpectedTensorError(CheckpointError):
    """A tensor of the checkpoint has no parameter to go to, and no named rule drops it."""


class ShapeMismatchError(CheckpointError):
    """A tensor of the checkpoint has a parameter to go to, but not its shape or dtype."""


class RequestError(UserError):
    """A request that the model cannot do; others go on."""


class VersionError(UserError):
    """A release of vLLM or Transformers that tfbackend was not written for."""


class PlanConflictError(TfbackendError, AssertionError):
    """Two rewrites claim one site. No input should be able to cause this: it is a bug in a fuser."""


def _compose(summary: str, where: str | None, found: str | None, needed: str | None, remedy: str | None) -> str:
    labelled = (("Where", where), ("Found", found), ("Needed", needed))
    parts = [summary, *(f"{label}: {value}" for label, value in labelled if value is not None), remedy]
    return " ".join(_as_sentence(part) for part in parts if part)


def _as_sentence(part: str) -> str:
    part = part.strip()
    return part if part.endswith(_SENTENCE_ENDS) else f"{part}."
