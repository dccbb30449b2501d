"""The Django app: it has a management command and no models."""

from django.apps import AppConfig


class StillfreshConfig(AppConfig):
    """`"stillfresh.integrations.django"` in INSTALLED_APPS."""

    name = "stillfresh.integrations.django"
    label = "stillfresh"
    verbose_name = "stillfresh"
