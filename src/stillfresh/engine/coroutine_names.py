"""Names for coroutines: a forgotten `await` names the function that the user wrote.

Python warns that a coroutine "was never awaited", by the name of the function that made it. For a
cached function that would be a method of this package, the same for all functions of a program.
Therefore each declaration gets a class with copies of the coroutine methods, named after it.

The interpreter adapts a code object to the class of its `self`, and code that objects of many
classes run stays slow. So the methods of a hit get code of their own, which costs 1 KB each, and a
hit costs what it cost before. The others, which wait for a store or a load, share their code.
"""

from inspect import CO_COROUTINE
from types import CodeType, FunctionType
from typing import TypeVar

T = TypeVar("T")

HIT = ("__call__", "get")
"""Methods that answer from memory."""


def name_of(function: object) -> str:
    """What Python calls a function in its messages; an object that is called has its class's."""
    name: str | None = getattr(function, "__qualname__", None)
    return type(function).__qualname__ if name is None else name


def class_named_after(base: type[T], name: str) -> type[T]:
    """Return a class like `base`, for the object that a program calls `name`."""
    members: dict[str, object] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
    }
    for method, function in _coroutine_methods(base).items():
        copy = _copy(function, function.__code__.replace() if method in HIT else function.__code__)
        copy.__qualname__ = name if method == "__call__" else f"{name}.{method}"
        members[method] = copy
    named: type[T] = type(base.__name__, (base,), members)
    return named


def _coroutine_methods(base: type) -> dict[str, FunctionType]:
    """The `async def` methods of a class, inherited ones included."""
    members: dict[str, object] = {}
    for each in reversed(base.__mro__):
        members.update(vars(each))
    return {
        name: member
        for name, member in members.items()
        if isinstance(member, FunctionType) and member.__code__.co_flags & CO_COROUTINE
    }


def _copy(function: FunctionType, code: CodeType) -> FunctionType:
    """The same function with this code. A coroutine has the name of its function, not its code."""
    copy = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    copy.__module__ = function.__module__
    return copy
