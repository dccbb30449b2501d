"""Entries that were made of a model are invalidated when it changes, after the commit (E6, E8).

An entry says what it is made of by its tags: `shop.product` for any product, `shop.product:7` for
one. Django sends no signals for `update()` and `bulk_create()`: call `invalidate` after them.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_delete, post_save

from stillfresh.contrib.django.backend import backend_of
from stillfresh.errors import ConfigError


def tag_of(model: Any) -> str:
    """The tag of an instance, or of all instances of a model."""
    if not hasattr(model, "_meta"):
        raise ConfigError(f"a model or an instance is needed here, not {model!r}")
    label: str = model._meta.label_lower
    return label if isinstance(model, type) else f"{label}:{model.pk}"


def invalidate(*models: Any, cache: str = "default") -> None:
    """Invalidate what is tagged with these instances or models, now."""
    _invalidate(cache, [tag_of(it) for it in models])


def invalidate_on_change(*models: type[Model], cache: str = "default") -> None:
    """From now on, a save or a delete of an instance invalidates both of its tags.

    So does a change of its relations to many. Call it once, for example in `AppConfig.ready`.
    """
    for model in models:
        changed = partial(_changed, cache)
        uid = f"stillfresh:{cache}:{tag_of(model)}"
        for signal in (post_save, post_delete):
            signal.connect(changed, sender=model, weak=False, dispatch_uid=uid)
        for field in model._meta.many_to_many:
            through = field.remote_field.through
            m2m_changed.connect(partial(_related, cache), through, weak=False, dispatch_uid=uid)


def _changed(cache: str, *, instance: Model, using: str, **_: object) -> None:
    _after_commit(cache, using, [instance])


def _related(
    cache: str,
    *,
    instance: Model,
    model: type[Model],
    pk_set: Iterable[Any] | None,
    action: str,
    using: str,
    **_: object,
) -> None:
    """Both sides; of a `clear()` Django does not say which were related."""
    if action.startswith("post_"):
        others = [model(pk=pk) for pk in pk_set or ()]
        _after_commit(cache, using, [instance, *others] if others else [instance, model])


def _after_commit(cache: str, using: str, changed: list[Any]) -> None:
    """Earlier, a reader would load the old rows again and keep them."""
    tags = {tag for it in changed for tag in (tag_of(it), tag_of(_class_of(it)))}
    transaction.on_commit(partial(_invalidate, cache, sorted(tags)), using=using)


def _class_of(changed: Any) -> Any:
    return changed if isinstance(changed, type) else type(changed)


def _invalidate(alias: str, tags: list[str]) -> None:
    cache = backend_of(alias, "tags")
    for tag in tags:
        cache.invalidate_tag(tag)
