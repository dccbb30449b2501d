"""Views that were old already when they came: their age then, by the upstream's `Age` and `Date`.

Such a view is a dict or a list like any other, and equal to one. REST and live add its age to the
time since the upstream was asked.
"""

from typing import Any


class AgedObject(dict[str, Any]):
    """A JSON object with its age, in seconds, when it was requested."""

    __slots__ = ("initial_age",)
    initial_age: float


class AgedArray(list[Any]):
    """A JSON array with its age, in seconds, when it was requested."""

    __slots__ = ("initial_age",)
    initial_age: float


def with_age(view: object, initial_age: float) -> object:
    """The view with its age. A text, a number, a truth value or null has no place for one."""
    aged: AgedObject | AgedArray
    match view:
        case dict():
            aged = AgedObject(view)
        case list():
            aged = AgedArray(view)
        case _:
            return view
    aged.initial_age = initial_age
    return aged


def initial_age_of(view: object) -> float:
    """The age of a view when it was requested; 0 if nothing says that it was older."""
    return view.initial_age if isinstance(view, AgedObject | AgedArray) else 0.0
