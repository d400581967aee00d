import inspect
import pickle
import re

import pytest

from tfbackend import errors

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


def test_message_answers_where_found_needed_and_what_to_do():
    error = errors.ShapeMismatchError(
        "The tensor does not fit", where="a.b.weight", found="(2, 3)", needed="(3, 3)", remedy="Check hidden_size."
    )
    assert str(error) == (
        "The tensor does not fit. Where: a.b.weight. Found: (2, 3). Needed: (3, 3). Check hidden_size."
    )


def test_parts_that_are_not_given_are_not_mentioned():
    assert str(errors.ConfigError("Zero heads", found="0")) == "Zero heads. Found: 0."


@pytest.mark.parametrize("kind", TREE)
def test_survives_the_trip_between_processes(kind):
    error = kind("Bad", where="here", found="this", needed="that", remedy="Do so")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", TREE)
def test_is_for_the_user_or_for_us_and_never_both(kind):
    if kind is not errors.TfbackendError:
        assert issubclass(kind, ValueError) != issubclass(kind, AssertionError)


def test_docstring_draws_the_whole_tree():
    drawn = re.findall(r"^[│ ]*[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(kind.__name__ for kind in TREE if kind is not errors.TfbackendError)
