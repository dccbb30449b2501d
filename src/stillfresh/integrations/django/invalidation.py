"""Entries that were made of a model are invalidated when it changes, after the commit.

An entry says what it is made of by its tags: `shop.product` for any product, `shop.product:7` for
one. Django sends no signals for `update()` and `bulk_create()`: call `invalidate` after them.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Model
from django.db.models.signals import m2m_changed, post_delete, post_save

from stillfresh.errors import ConfigError
from stillfresh.integrations.django.backend import backend_of


def tag_of(model: Any) -> str:
    """Return the tag of an instance, or of a model: of all its instances."""
    if not hasattr(model, "_meta"):
        raise ConfigError(f"a model or an instance is needed here, not {model!r}")
    label: str = model._meta.concrete_model._meta.label_lower
    return label if isinstance(model, type) else f"{label}:{model.pk}"


def invalidate(*models: Any, cache: str = "default") -> None:
    """Invalidate entries that are tagged with these instances or models."""
    _invalidate(cache, [tag_of(model) for model in models])


def invalidate_on_change(*models: type[Model], cache: str = "default") -> None:
    """Invalidate the tags of an instance whenever one of these models is saved or deleted.

    Changes of a proxy, a child model or a many-to-many relation count too. Call it once, for
    example in `AppConfig.ready`.
    """
    uid = f"stillfresh:{cache}"
    for model in models:
        tag_of(model)
        family: list[type[Model]] = [model._meta.concrete_model]
        for member in family:  # the list grows while it is walked, until it has all descendants
            family += member.__subclasses__()
            for signal in (post_save, post_delete):
                receiver = partial(_invalidate_instance, cache)
                signal.connect(receiver, member, weak=False, dispatch_uid=uid)
        back = [relation.field for relation in model._meta.related_objects if relation.many_to_many]
        for field in (*model._meta.many_to_many, *back):
            through = field.remote_field.through
            receiver = partial(_invalidate_relation, cache, field)
            m2m_changed.connect(receiver, through, weak=False, dispatch_uid=uid)


def _invalidate_instance(cache: str, *, instance: Model, using: str, **_: object) -> None:
    _invalidate_after_commit(cache, using, [instance])


def _invalidate_relation(
    cache: str,
    field: Any,
    *,
    instance: Model,
    model: type[Model],
    reverse: bool,
    pk_set: Iterable[Any] | None,
    action: str,
    using: str,
    **_: object,
) -> None:
    """Invalidate both sides; for `clear()` read them before, since they are unknown after it."""
    if action == "pre_clear":
        name = field.remote_field.get_accessor_name() if reverse else field.name
        pk_set = getattr(instance, name).using(using).values_list("pk", flat=True)
    elif not action.startswith("post_"):
        return
    others = [model(pk=pk) for pk in pk_set or ()]
    _invalidate_after_commit(cache, using, [instance, *others])


def _invalidate_after_commit(cache: str, using: str, instances: list[Model]) -> None:
    """Invalidate the instances and their parents after the commit.

    Before the commit, a reader would load the old rows again.
    """
    tags: set[str] = set()
    for instance in instances:
        concrete = instance._meta.concrete_model
        for model in (concrete, *concrete._meta.get_parent_list()):
            pk = getattr(instance, model._meta.pk.attname, None)
            if pk is None:
                pk = instance.pk
            tags.add(tag_of(model))
            tags.add(f"{tag_of(model)}:{pk}")
    transaction.on_commit(partial(_invalidate, cache, sorted(tags)), using=using)


def _invalidate(alias: str, tags: list[str]) -> None:
    cache = backend_of(alias, "tags")
    for tag in tags:
        cache.invalidate_tag(tag)
