"""The rule of `tfbackend verify`, and a tighter bound for tests: both say alike whether an engine computed what
Transformers computes."""

from tfbackend.verification.judge import LOGPROB, MARGIN, Verdict, judge

__all__ = ["LOGPROB", "MARGIN", "SAME_COMPUTATION", "Verdict", "judge"]

# Two float32 runs of one computation agree within 2e-5. Here is room for ten times that, and no more: a GELU taken for
# its tanh form moves the log-probabilities of a tiny model by about 1e-3, which the rule alone would let pass.
SAME_COMPUTATION = 2e-4
