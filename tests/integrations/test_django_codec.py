"""E11 in Django: what is stored comes back the same, and stored bytes cannot run code."""

import datetime as dt
import sys
from contextlib import suppress
from decimal import Decimal
from http.cookies import SimpleCookie
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from tests.kit import shop

shop.configure()

from django.http import (  # noqa: E402 (after settings)
    HttpResponse,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines  # noqa: E402
from django.template.response import SimpleTemplateResponse  # noqa: E402
from django.utils.safestring import SafeString, mark_safe  # noqa: E402
from django.utils.translation import gettext_lazy  # noqa: E402

from stillfresh.integrations.django import DjangoCodec  # noqa: E402
from tests.kit.shop.models import Label, Product  # noqa: E402

CODEC = DjangoCodec()
ZONES = st.none() | st.sampled_from([dt.UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")])
HASHABLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes(timezones=ZONES)
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(HASHABLE | st.tuples(HASHABLE), inner)
        | st.frozensets(HASHABLE)
        | st.sets(HASHABLE)
    ),
    max_leaves=20,
)


def again(value: Any) -> Any:
    return CODEC.decode(CODEC.encode(value))


def typed(value: Any) -> Any:
    """A value that is equal only to one of the same types; of a set, types cannot be told."""
    if isinstance(value, list | tuple):
        return type(value), [typed(it) for it in value]
    if isinstance(value, dict):
        return [(typed(key), typed(it)) for key, it in value.items()]
    return type(value), value


class TestE11Plain:
    @given(value=VALUES)
    def test_plain_values_keep_their_value_and_type(self, value: Any) -> None:
        """Equal, and of the same types: a tuple is no list, True is not 1, 1.0 is no int."""
        assert typed(again(value)) == typed(value)

    @pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 2**4000])
    def test_integers_of_any_size_are_kept(self, value: int) -> None:
        """As in Python."""
        assert again(value) == value

    @pytest.mark.parametrize("text", ["NaN", "sNaN12", "-Infinity", "1.10", "1E+3"])
    def test_a_decimal_keeps_its_digits(self, text: str) -> None:
        """And what is no number stays none."""
        assert str(again(Decimal(text))) == text

    @pytest.mark.parametrize("hours", [0, -3, 5.5])
    def test_a_datetime_keeps_its_time_zone(self, hours: float) -> None:
        """A fixed one by its offset, a named one by its name."""
        zone = dt.timezone(dt.timedelta(hours=hours))
        at = dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone)
        named = at.replace(tzinfo=ZoneInfo("Europe/Berlin"))
        assert [(it, it.fold, it.utcoffset()) for it in again([at, named])] == [
            (it, it.fold, it.utcoffset()) for it in (at, named)
        ]

    def test_safe_text_stays_safe(self) -> None:
        """A template fragment is not escaped twice; a translation is the text that it is now."""
        assert type(again(mark_safe("<b>"))) is SafeString
        assert again(gettext_lazy("yes")) == "yes"


class TestE11Responses:
    @pytest.mark.parametrize(
        "response",
        [
            HttpResponse("text", status=201, reason="Made", headers={"X-Two": "a, b"}),
            HttpResponse(b"\xff", content_type="image/png"),
            HttpResponse("ü", charset="latin-1"),
            HttpResponseRedirect("/elsewhere"),
            JsonResponse({"a": 1}),
        ],
    )
    def test_a_response_keeps_status_headers_cookies_and_body(self, response: HttpResponse) -> None:
        """Status, reason, headers, cookies, body; a redirect is a redirect."""
        response.set_cookie("kind", "a; b", max_age=5, httponly=True, samesite="Lax")
        back = again(response)
        assert back.serialize() == response.serialize()
        assert (back.cookies, back.reason_phrase) == (response.cookies, response.reason_phrase)
        assert getattr(back, "url", None) == getattr(response, "url", None)

    def test_a_rendered_template_response_is_stored_as_a_response(self) -> None:
        """Its context is not kept, and need not be one that can be."""
        template = engines["django"].from_string("{{ who }}")
        response = SimpleTemplateResponse(template, {"who": "you", "more": object()}).render()
        assert again(response).content == b"you"

    def test_a_streaming_response_is_refused(self) -> None:
        """It can be sent once only."""
        with pytest.raises(TypeError, match="StreamingHttpResponse cannot be cached"):
            CODEC.encode(StreamingHttpResponse([b"a"]))

    def test_a_cookie_object_is_kept(self) -> None:
        """As Django keeps them."""
        cookies: SimpleCookie = SimpleCookie("a=1; b=2")
        assert again(cookies) == cookies


@pytest.fixture
def product() -> Any:
    shop.tables()
    return Product.objects.create(name="Lamp", price=Decimal("9.90"), photo="lamp.png")


class TestE11Models:
    def test_a_model_instance_keeps_its_fields_and_state(self, product: Any) -> None:
        """A row that was read, one that was not saved yet, and its file by name."""
        product = Product.objects.get()
        back = again([product, Product(name="New")])
        assert back == [product, back[1]]
        assert [(it.name, it.price, it._state.adding, it._state.db) for it in back] == [
            ("Lamp", Decimal("9.90"), False, "default"),
            ("New", 1, True, None),
        ]
        assert back[0].photo.name == "lamp.png"
        assert back[0].labels.count() == 0

    def test_a_deferred_field_stays_deferred(self, product: Any) -> None:
        """It is loaded when it is asked for."""
        back = again(Product.objects.defer("price").get())
        assert back.get_deferred_fields() == {"price"}
        assert back.price == Decimal("9.90")

    def test_a_queryset_is_stored_as_a_list(self, product: Any) -> None:
        """Of the instances that it found, with their annotations."""
        from django.db.models import F  # noqa: PLC0415

        (back,) = again(Product.objects.annotate(also=F("name")))
        assert (back, back.also) == (product, "Lamp")
        assert again(Product.objects.values_list("name", flat=True)) == ["Lamp"]

    def test_loaded_related_instances_are_stored_once(self, product: Any) -> None:
        """Are kept, once; a circle of them is left to be loaded."""
        product.made_of = product
        product.save()
        Product.objects.create(name="Desk", made_of=product)
        desk = Product.objects.select_related("made_of").get(name="Desk")
        assert again(desk)._state.fields_cache == {"made_of": product}
        assert again(product).made_of == product

    def test_an_instance_of_a_removed_model_cannot_be_decoded(self, product: Any) -> None:
        """So the cache takes it for a miss (E11); a field that is gone, too."""
        for old, new in ((b"shop.product", b"shop.produce"), (b"\xa5price", b"\xa5prize")):
            data = CODEC.encode(Product.objects.get())
            assert old in data
            with pytest.raises(LookupError):
                CODEC.decode(data.replace(old, new))


class TestE11Refused:
    @pytest.mark.parametrize(
        ("value", "name"),
        [
            (object(), "builtins.object"),
            (print, "builtin_function_or_method"),
            (Label, "ModelBase"),
            ({"a": [object()]}, "builtins.object"),
            (ValueError("no"), "ValueError"),
            (st.just(1), "hypothesis"),
        ],
    )
    def test_values_of_other_types_are_refused_by_name(self, value: Any, name: str) -> None:
        """And with what to do instead."""
        with pytest.raises(TypeError, match=rf"{name}.* cannot be cached.*OPTIONS\['CODEC'\]"):
            CODEC.encode(value)

    def test_a_value_that_contains_itself_is_refused(self) -> None:
        """Has no end."""
        value: list[Any] = []
        value.append(value)
        with pytest.raises(TypeError, match="contains itself"):
            CODEC.encode(value)

    @given(data=st.binary())
    def test_decoding_any_bytes_imports_nothing(self, data: bytes) -> None:
        """Decoded, or an error; nothing else happens."""
        for code in range(20):
            modules = set(sys.modules)
            with suppress(Exception):  # any error will do
                CODEC.decode(msgpack.encode(msgpack.Ext(code, data)))
            assert set(sys.modules) == modules
