"""Settings from the environment: `STILLFRESH_STORE__URL` is `url` of `[store]`.

Pure: variables in, tables out, as a file would have them. `STILLFRESH_KINDS__POST__FRESH_FOR` is
`fresh_for` of `[kinds.post]`. No value of a variable is in an error of this file: it may be secret.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from stillfresh.gateway.setting_readers import keys_of

PREFIX: Final = "STILLFRESH_"
PARTS: Final = "__"


def variables_in(
    environ: Mapping[str, str], models: Mapping[str, type]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Tables as in a file, the variable of each key, and mistakes.

    A name without `__` may belong to another program, such as a Kubernetes service. It is only
    reported if another `_` would make it one of ours.
    """
    tables: dict[str, Any] = {}
    named: dict[str, str] = {}
    mistakes: list[str] = []
    known = {_variable(table, key) for table, model in models.items() for key in keys_of(model)}
    plain = {variable.replace(PARTS, "_"): variable for variable in known}
    for name in sorted(variable for variable in environ if variable.startswith(PREFIX)):
        path = name.removeprefix(PREFIX).lower().split(PARTS)
        if len(path) == 1:
            if name in plain:
                mistakes.append(f"{name}: unknown setting; did you mean {plain[name]}?")
            continue
        table, *kind, key = path
        keys = keys_of(models[table]) if table in models else {}
        if key not in keys or len(kind) != int(table == "kinds"):
            mistakes.append(f"{name}: unknown setting; {_meant(name, path, known)}")
            continue
        place = tables.setdefault(table, {})
        for part in kind:
            place = place.setdefault(part, {})
        place[key] = value_of(environ[name], str(keys[key].type))
        named[".".join(path)] = name
    return tables, named, mistakes


def _variable(table: str, key: str) -> str:
    between = PARTS + "NAME" if table == "kinds" else ""
    return f"{PREFIX}{table}{between}{PARTS}{key}".upper()


def _meant(name: str, path: list[str], known: set[str]) -> str:
    variable = name
    if path[0] == "kinds" and len(path) == 3:
        variable = _variable("kinds", path[2])
    near = get_close_matches(variable, sorted(known), 1)
    return f"did you mean {near[0]}?" if near else "docs/gateway.md lists all keys"


def value_of(text: str, of: str) -> Any:  # noqa: ANN401 (as a file would have it)
    """A text as it is; a number, a flag, a list or a table as TOML writes it; a list with commas.

    `of` is the type of the setting.
    """
    if of in {"<class 'str'>", "str", "str | None"}:
        return text
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        if of.startswith("tuple["):
            return [item.strip() for item in text.split(",")]
        return text


def by_name(mistake: str, named: Mapping[str, str]) -> str:
    """A mistake names the variable or the option, if one was given, and not its key."""
    for key, name in named.items():
        if mistake.startswith((f"{key}:", f"{key}.")):
            return name + mistake.removeprefix(key)
    return mistake
