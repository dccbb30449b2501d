"""Runs Django's own cache tests on our backend: `FOLDER URL [CLASS]...`.

FOLDER is the `tests` of Django's source distribution.

Where a test sleeps, the clock of the caches is put forward instead.

Prints one line for each test: its name, then `passed`, `failed` or `skipped`. What a failure said
goes to standard error.
"""

import sys
import time
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any
from unittest import TestCase, TestResult, TestSuite, defaultTestLoader, mock

import django
from django.conf import settings

from stillfresh.integrations.django import cache_page, shared
from stillfresh.integrations.tagged_values import BlockingCache

BACKEND = "stillfresh.integrations.django.StillfreshCache"
OTHERS = (
    "CacheUtils",
    "PrefixedCacheUtils",
    "CacheHEADTest",
    "CacheI18nTest",
    "PrefixedCacheI18nTest",
    "CacheMiddlewareTest",
    "TestWithTemplateResponse",
    "DefaultNonExpiringCacheKeyTests",
    "TestMakeTemplateFragmentKey",
    "CacheHandlerTest",
)
"""Classes that Django runs on its cache in memory."""
APPS = ("cache", "sessions_tests")
SESSIONS = ("CacheSessionTests", "CacheDBSessionTests", "CacheDBSessionWithTimeZoneTests")


class Lines(TestResult):
    """A line for each test."""

    def __init__(self) -> None:
        super().__init__()
        self._how = "passed"

    def startTest(self, test: TestCase) -> None:  # noqa: N802 (unittest's name)
        super().startTest(test)
        self._how = "passed"

    def stopTest(self, test: TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        print(test.id(), self._how, flush=True)

    def addSkip(self, test: TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._how = "skipped"

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._failed(test, self.errors[-1][1])

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._failed(test, self.failures[-1][1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(subtest, str(err[1]))

    def _failed(self, test: Any, said: str) -> None:
        self._how = "failed"
        print(test, said, file=sys.stderr)


def ours(caches: dict[str, Any], url: str) -> dict[str, Any]:
    """The same aliases on our backend; those of one place stay in one place."""
    places = sorted({str(params.get("LOCATION", "")) for params in caches.values()})
    changed = deepcopy(caches)
    for params in changed.values():
        name = f"place_{places.index(str(params.get('LOCATION', '')))}"
        params.setdefault("OPTIONS", {}).setdefault("NAME", name)
        params |= {"BACKEND": BACKEND, "LOCATION": url}
    return changed


def suite(url: str) -> TestSuite:
    """Each backend's tests, those of pages and keys, those of sessions; and pages on `cache_page`
    of ours."""
    from django.test import TestCase as DjangoTestCase  # noqa: PLC0415
    from django.test import override_settings  # noqa: PLC0415

    tests, sessions = (import_module(f"{app}.tests") for app in APPS)

    def made(name: str, *bases: type) -> type:
        return type(name, bases, {"__module__": tests.__name__})

    own = override_settings(CACHES=tests.caches_setting_for_tests(BACKEND=BACKEND, LOCATION=url))
    classes = [own(made("StillfreshCacheTests", tests.BaseCacheTests, DjangoTestCase))]
    classes += [on_ours(getattr(tests, name), url) for name in OTHERS]
    classes += [getattr(sessions, name) for name in SESSIONS]
    pages = made("StillfreshPageTests", tests.CacheMiddlewareTest)
    classes.append(mock.patch.object(tests, "cache_page", cache_page)(pages))
    wanted = sys.argv[3:] or [tested.__name__ for tested in classes]
    loader = defaultTestLoader.loadTestsFromTestCase
    return TestSuite(loader(tested) for tested in classes if tested.__name__ in wanted)


def on_ours(of: Any, url: str) -> Any:
    if "CACHES" in (given := of._overridden_settings or {}):
        of._overridden_settings = {**given, "CACHES": ours(given["CACHES"], url)}
    return of


def put_forward() -> None:
    """From now on a sleep takes no time, for the caches alone."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    cache = partial(BlockingCache, clock=lambda: time.time() + slept)
    shared.BlockingCache = cache  # type: ignore[attr-defined,assignment]
    time.sleep = sleep  # type: ignore[assignment]


def main(folder: str, url: str) -> None:
    put_forward()
    sys.path.insert(0, folder)
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.sessions", *APPS],
        DATABASES={"default": database},
        CACHES={"default": {"BACKEND": BACKEND, "LOCATION": url}},
        ROOT_URLCONF="",
        LANGUAGE_CODE="en",
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
        SECRET_KEY="tests",  # noqa: S106
        USE_TZ=False,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()
    from django.test.utils import setup_databases, setup_test_environment  # noqa: PLC0415

    setup_test_environment()
    setup_databases(verbosity=0, interactive=False)
    suite(url).run(Lines())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
