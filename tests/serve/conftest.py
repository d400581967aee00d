"""The harness that all engine tests of one run share, so that no engine is started twice for the same question."""

from collections.abc import Iterator

import pytest

from tests.serve.engine import Harness


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """The warm processes, the checkpoints and everything already served."""
    harness = Harness()
    yield harness
    harness.close()
