"""TtlConfig: the coordinator's settings, from the environment or from code (C1)."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from stillfresh.checks import checked_flag, checked_whole
from stillfresh.errors import ConfigError, shown

MOST: Final = 315_360_000_000
"""Ten years in milliseconds: more is a mistake, not a wish."""
LEAST: Final = {"cooldown_ms": 0}
WORDS: Final = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TtlConfig:
    """Each field is the environment variable of the same name in capitals."""

    post_ttl_ms: int = 300_000
    user_ttl_ms: int = 600_000
    batch_interval_ms: int = 5_000
    post_max_batch_size: int = 20
    user_max_batch_size: int = 20
    cooldown_ms: int = 10_000
    refresh_when_hidden: bool = False
    max_batches_per_tick: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name.upper(), getattr(self, field.name)
            if field.type is bool:
                checked_flag(name, value)
            else:
                checked_whole(name, value, LEAST.get(field.name, 1), MOST)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The variables that are set; the others have their defaults."""
        given = os.environ if environ is None else environ
        values: dict[str, int | bool] = {}
        for field in fields(cls):
            name = field.name.upper()
            if (text := given.get(name)) is not None:
                read: Callable[[str, str], int | bool] = _flag if field.type is bool else _number
                values[field.name] = read(name, text)
        return cls(**values)  # type: ignore[arg-type]  # read by the field's own type


def checked_config(config: TtlConfig) -> TtlConfig:
    if not isinstance(config, TtlConfig):
        raise ConfigError(f"config: takes a TtlConfig, not {shown(config)}")
    return config


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip(), re.ASCII):
        raise ConfigError(f"{name}: must be a whole number such as 5000, not {shown(text)}")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if (value := WORDS.get(text.strip().lower())) is None:
        raise ConfigError(f"{name}: must be true or false, not {shown(text)}")
    return value
