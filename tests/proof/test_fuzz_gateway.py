"""T5: the gateway's edges against anything: settings, ids, batches, upstream answers, durations."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, LoadFailed
from stillfresh.gateway import gateway
from stillfresh.gateway.config import (
    KindSettings,
    Mistakes,
    PagesSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    settings_of,
)
from stillfresh.gateway.setting_readers import keys_of
from stillfresh.gateway.sources import id_maker, views_by_id, views_in
from stillfresh.systems.coordinator import Kind
from tests.kit.examples import examples

MODEST = settings(max_examples=examples(25))

SPICES = [
    "",
    "\0",
    "a\nb",
    "\ud800",
    "sqlite:///a%00b.db",
    "redis://u:sekret@[",
    "http://u:sekret@h:99999/",
    "http://[::1",
    "999.1.1.1",
    "{a.b}",
    "{",
    "1e999s",
    "5m",
    "*.example.com",
    "10.0.0.0/8",
]
texts = st.sampled_from(SPICES) | st.text(max_size=20)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.times()
    | st.datetimes()
    | texts
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def table(model: type) -> st.SearchStrategy[Any]:
    names = st.sampled_from(sorted(keys_of(model))) | texts
    return st.dictionaries(names, values, max_size=6) | values


FILES = st.fixed_dictionaries(
    {},
    optional={
        "store": table(StoreSettings),
        "pages": table(PagesSettings),
        "kinds": st.dictionaries(texts | st.just("post"), table(KindSettings), max_size=2) | values,
        "server": table(ServerSettings),
        "other": values,
    },
)


class TestT5Settings:
    @MODEST
    @given(FILES, st.dictionaries(st.just("STILLFRESH_TOKEN"), texts))
    def test_any_tables_are_settings_or_mistakes(
        self, tables: dict[str, Any], environ: dict[str, str]
    ) -> None:
        """Nothing else is raised; each mistake is one printable line."""
        try:
            found = settings_of(tables, environ)
        except Mistakes as exc:
            lines = exc.mistakes
        else:
            assert isinstance(found, Settings)
            return
        assert lines
        assert all(line.isprintable() for line in lines)

    @MODEST
    @given(values)
    def test_a_duration_is_a_number_of_seconds_or_a_mistake(self, value: Any) -> None:
        """Seconds that time can be reckoned with."""
        with suppress(ConfigError):
            assert seconds(value, name="x") >= 0


async def echo(ids: list[str]) -> dict[str, Any]:
    return {id_: {"id": id_} for id_ in ids}


async def asked(method: str, path: str, body: bytes = b"") -> httpx.Response:
    app = gateway(kinds=[Kind("post", fetch=echo, fresh_for="1h")])
    transport = httpx.ASGITransport(app=app)
    headers = {"content-type": "application/json"}
    async with app, httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.request(method, path, content=body, headers=headers)


def percent(raw: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in raw)


BODIES = st.binary(max_size=60) | st.builds(
    lambda value: json.dumps(value).encode(),
    st.fixed_dictionaries({"ids": st.lists(texts, max_size=4) | values.map(str)})
    | st.lists(st.integers(), max_size=3),
)
NESTED = st.sampled_from([b"[" * 5_000, b'{"ids":' * 5_000, b'{"ids":[1e999]}', b"\xff\xfe"])


class TestT5Rest:
    @MODEST
    @given(st.binary(min_size=1, max_size=30) | texts.map(lambda it: it.encode(errors="replace")))
    def test_any_id_is_answered(self, raw: bytes) -> None:
        """With its view, or with what is wrong; never with a mistake of ours."""
        answer = asyncio.run(asked("GET", f"/v1/post/{percent(raw)}"))
        assert answer.status_code in {200, 404, 422}, answer.text
        if answer.status_code == 200:
            assert answer.json() == {"id": raw.decode()}

    @MODEST
    @given(BODIES | NESTED)
    def test_any_batch_is_answered(self, body: bytes) -> None:
        """Each id once, in order; or 422."""
        answer = asyncio.run(asked("POST", "/v1/post/batch", body))
        assert answer.status_code in {200, 422}, answer.text
        if answer.status_code == 200:
            told = [item["id"] for item in answer.json()["items"]]
            assert told == list(dict.fromkeys(json.loads(body)["ids"]))


VIEWS = st.lists(
    st.none()
    | st.dictionaries(st.sampled_from(["id", "x"]), texts | st.integers() | st.booleans())
    | st.text(max_size=3),
    max_size=5,
)


class TestT5Upstream:
    @MODEST
    @given(st.binary(max_size=80) | NESTED, st.none() | st.just("data.items"))
    def test_any_upstream_answer_is_a_list_or_a_failure(
        self, body: bytes, where: str | None
    ) -> None:
        """Also one of five thousand brackets."""
        with suppress(LoadFailed):
            assert isinstance(views_in(body, where), list)

    @MODEST
    @given(VIEWS, st.integers(0, 200))
    def test_a_truncated_upstream_answer_is_a_failure(self, views: list[Any], cut: int) -> None:
        """None of its ids is taken for absent."""
        whole = json.dumps(views).encode()
        if cut >= len(whole):
            with suppress(LoadFailed):  # half a character is none
                assert views_in(whole, None) == json.loads(whole)
            return
        with pytest.raises(LoadFailed):
            views_in(whole[:cut], None)

    @MODEST
    @given(VIEWS)
    def test_a_missing_id_beside_a_broken_view_is_a_failure(self, views: list[Any]) -> None:
        """It could be that one; without a broken one, who is missing is absent."""
        found = views_by_id(["a", "b"], views, id_maker("{id}"))
        broken = [it for it in views if it is not None and not is_named(it)]
        for id_ in ("a", "b"):
            is_there = any(is_named(it) and str(it["id"]) == id_ for it in views)
            assert (id_ in found) == (is_there or bool(broken))


def is_named(view: Any) -> bool:
    id_ = view.get("id") if isinstance(view, dict) else None
    return isinstance(id_, (str, int)) and not isinstance(id_, bool) and id_ != ""
