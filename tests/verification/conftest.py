"""One planter for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.verification.planting import Planter


@pytest.fixture(scope="session")
def planter() -> Iterator[Planter]:
    """The shared processes, checkpoints and answers."""
    made = Planter()
    yield made
    made.close()
