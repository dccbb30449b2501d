"""I1, I2, I3: the FaceTheory schema, literally; no server is needed for what is pure."""

from dataclasses import fields
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, Policy
from stillfresh.stores.bodies import Body
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record
from stillfresh.stores.dynamodb import (
    DynamoStore,
    FaceTheoryCacheLease,
    FaceTheoryCacheMetadata,
)
from stillfresh.stores.dynamodb.rows import (
    Lock,
    failure_attributes,
    lock_of,
    merged,
    meta_item,
    row_of,
)
from stillfresh.stores.dynamodb.schema import Names, cache_key, cache_pk, object_metadata, tag_pk

NOW = 1_700_000_000.0
PK = "CACHE#" + sha256(b"/pricing").hexdigest()


class TestI1Keys:
    def test_the_key_of_a_row_is_the_hash_of_the_cache_key(self) -> None:
        """`CACHE#` and the SHA-256 of the cache key, in hex."""
        assert cache_pk("/pricing") == PK
        assert cache_pk("") == (
            "CACHE#e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        )

    def test_the_key_of_a_tenants_row_begins_with_the_tenant(self) -> None:
        """The tenant stands in front."""
        assert cache_pk("/pricing", "acme") == f"TENANT#acme#{PK}"
        assert tag_pk("shop", "acme") == f"TENANT#acme#TAG#{sha256(b'shop').hexdigest()}"

    def test_a_page_is_its_cache_key(self) -> None:
        """Kind `page`: other languages find the same row under the plain cache key."""
        assert Names("t").pk("page", "/pricing") == PK
        assert Names("t", "acme").pk("page", "/pricing") == f"TENANT#acme#{PK}"

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["page", "price", "p"]), st.text(alphabet="ap\0/", max_size=6)
            ),
            min_size=2,
            max_size=2,
            unique=True,
        )
    )
    def test_no_two_entries_share_a_key(self, entries: list[tuple[str, str]]) -> None:
        """Whatever the kinds and ids are."""
        one, other = entries
        assert cache_key(*one) != cache_key(*other)

    @pytest.mark.parametrize("tenant", ["", "#", "a#b", "a#CACHE", "#x", 7, "x" * 201, "\ud800"])
    def test_refuses_a_tenant_that_could_name_anothers_partition(self, tenant: Any) -> None:
        """Empty, with `#`, no text, or longer than a key may be."""
        with pytest.raises(ConfigError, match="tenant"):
            DynamoStore("table", bucket="bucket", tenant=tenant)

    def test_bodies_of_tenants_are_apart(self) -> None:
        """No tenant's bodies stand under another's prefix, whatever it is called."""
        tenants = [None, "a", "a/b", "a%2Fb", "..", "cache", "tenant=a"]
        prefixes = [Names("t", tenant).bodies for tenant in tenants]
        for one in prefixes:
            assert [other for other in prefixes if other.startswith(one)] == [one]

    def test_a_body_leads_back_to_its_row(self) -> None:
        """So that an eviction can ask whether anybody still points to it."""
        for tenant in (None, "a/b c"):
            names = Names("table", tenant)
            pk = names.pk("price", "sku-1")
            assert names.pk_of_body(names.body(pk, "token", "nonce")) == pk


class TestI20RawKeys:
    def test_the_cache_key_stands_in_the_pk(self) -> None:
        """FaceTheory's default, for pages; other kinds are hashed as before."""
        assert cache_pk("default::/a?b=1#c", raw=True) == "CACHE#default::/a?b=1#c"
        assert cache_pk("/a", "acme", raw=True) == "TENANT#acme#CACHE#/a"
        names = Names("t", is_raw=True)
        assert names.pk("page", "/a") == "CACHE#/a"
        assert names.pk("price", "/a") == Names("t").pk("price", "/a")

    @pytest.mark.parametrize("key", ["k" * 2_043, "\u00e9" * 1_022, "\ud800", "a" * 64])
    def test_a_raw_key_that_dynamodb_cannot_hold_is_hashed(self, key: str) -> None:
        """Longer than DynamoDB takes, no Unicode, or like a hash: it could be another's."""
        assert cache_pk(key, raw=True) == cache_pk(key)

    def test_the_longest(self) -> None:
        """Counted in bytes, with what stands before the key."""
        for key, tenant in (("k" * 2_042, None), ("\u00e9" * 1_021, None), ("k" * 2_030, "acme")):
            pk = cache_pk(key, tenant, raw=True)
            assert pk.endswith(f"CACHE#{key}")
            assert len(pk.encode()) == 2_048

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([None, "a", "b", "CACHE", "TENANT"]),
                st.sampled_from(["page", "price"]),
                st.one_of(
                    st.text(alphabet="aTENANTCHAG#:/\0", max_size=30),
                    st.sampled_from(["TENANT#b#CACHE#x", "#b#CACHE#", "x#CACHE#TENANT#a#CACHE#x"]),
                    st.sampled_from(["x", "y"]).map(lambda it: cache_pk(it)[6:]),
                    st.sampled_from(["x", "y"]).map(lambda it: Names("t").pk("price", it)[6:]),
                ),
            ),
            min_size=2,
            max_size=2,
            unique=True,
        )
    )
    def test_no_key_names_anothers_partition(self, entries: list[Any]) -> None:
        """Whatever `#` it holds: of two tenants, of two kinds, of a tag."""
        (one, *entry), (two, *other) = entries
        first, second = Names("t", one, is_raw=True), Names("t", two, is_raw=True)
        assert first.pk(*entry) != second.pk(*other)
        assert first.hashed(first.pk(*entry)) != second.hashed(second.pk(*other))
        assert first.pk(*entry).startswith(first.pk_prefix)
        assert one == two or not first.pk(*entry).startswith(second.pk_prefix)
        assert first.pk(*entry) != second.tag(other[1])

    def test_a_tenant_that_is_none_is_refused(self) -> None:
        """By the public function, too."""
        with pytest.raises(ConfigError, match="tenant"):
            cache_pk("/a", "a#b", raw=True)

    def test_bodies_of_raw_keys_are_apart(self) -> None:
        """By the whole key, under the prefix; a body does not lead back to its row."""
        names = Names("t", is_raw=True, prefix="isr/", is_short=True)
        bodies = [names.body(names.pk("page", key), "token", "n") for key in ("a#x", "b#x")]
        assert bodies[0] != bodies[1]
        assert all(body.startswith("isr/t/cache/~") for body in bodies)
        assert [names.pk_of_body(body) for body in bodies] == [None, None]
        assert names.object_key(names.pointer(bodies[0])) == bodies[0]
        assert names.ours(names.pointer(bodies[0]), "CACHE#a#x") == [bodies[0]]
        assert names.ours(names.pointer(bodies[0]), "CACHE#b#x") == []
        assert names.is_anothers(bodies[0], "CACHE#b#x")


class TestI18Metadata:
    def test_metadata_has_the_names_of_facetheory(self) -> None:
        """Literally."""
        fields = {"content-type": "application/json", "content-security-policy": "default-src *"}
        assert object_metadata(404, fields) == {
            "facetheory-status": "404",
            "facetheory-content-type": "application/json",
            "facetheory-content-security-policy": "default-src *",
        }

    @pytest.mark.parametrize("kind", ["", "text/\u00e9", "a\r\nb: c", " text/html", "t" * 256])
    def test_a_type_that_cannot_be_told_is_no_html(self, kind: str) -> None:
        """Without one, the other libraries would say that it is."""
        told = object_metadata(200, {"content-type": kind} if kind else {})
        assert told["facetheory-content-type"] == "application/octet-stream"

    @given(
        st.dictionaries(
            st.sampled_from(["content-type", "location", "content-security-policy"]),
            st.one_of(st.text(), st.text("a; ", min_size=1_500, max_size=2_500)),
        )
    )
    def test_status_and_type_always_fit(self, fields: dict[str, str]) -> None:
        """Printable ASCII in at most 2 KB; what does not fit is left out whole."""
        told = object_metadata(301, fields)
        assert told["facetheory-status"] == "301"
        assert told["facetheory-content-type"]
        assert sum(len(f"x-amz-meta-{name}{value}") for name, value in told.items()) <= 2_048
        for name, value in told.items():
            assert value.isascii()
            assert value.isprintable()
            assert value == value.strip()
            plain = name.removeprefix("facetheory-")
            assert plain in {"status", "content-type"} or value == fields[plain]


class TestI2Records:
    def test_attributes_are_named_as_in_every_language(self) -> None:
        """Field by field, in order."""
        names = [field.name for field in fields(FaceTheoryCacheMetadata)]
        assert names == ["pk", "sk", "s3_key", "generated_at", "revalidate_seconds", "etag", "ttl"]
        names = [field.name for field in fields(FaceTheoryCacheLease)]
        assert names == ["pk", "sk", "lease_token", "lease_expires_at", "ttl"]

    def test_metadata_as_it_lies_in_the_table(self) -> None:
        """Optional attributes are absent, never NULL, empty or zero."""
        meta = FaceTheoryCacheMetadata("CACHE#1", "META", "a/b", 1_700_000_000, 60)
        literal = {
            "pk": {"S": "CACHE#1"},
            "sk": {"S": "META"},
            "s3_key": {"S": "a/b"},
            "generated_at": {"N": "1700000000"},
            "revalidate_seconds": {"N": "60"},
        }
        assert meta.item() == literal
        assert FaceTheoryCacheMetadata.from_item(literal) == meta
        full = FaceTheoryCacheMetadata(
            "CACHE#1", "META", "a/b", 1_700_000_000, 60, '"x"', 1_700_604_860
        )
        literal |= {"etag": {"S": '"x"'}, "ttl": {"N": "1700604860"}}
        assert full.item() == literal
        assert FaceTheoryCacheMetadata.from_item(literal) == full

    def test_a_lease_as_it_lies_in_the_table(self) -> None:
        """Its row outlives it by an hour."""
        lease = FaceTheoryCacheLease.until("CACHE#1", "token", NOW + 5.2)
        assert lease.item() == {
            "pk": {"S": "CACHE#1"},
            "sk": {"S": "LOCK"},
            "lease_token": {"S": "token"},
            "lease_expires_at": {"N": "1700000006"},
            "ttl": {"N": "1700003606"},
        }
        assert FaceTheoryCacheLease.from_item(lease.item()) == lease

    def test_a_copy_as_it_lies_in_the_table(self) -> None:
        """The schema's attributes in whole seconds; beside them what they cannot say."""
        copy, body = Copy("token", NOW + 0.25, Policy(60, 10.5, 20), b"value"), Body(b"value")
        item = meta_item(copy, pk=PK, s3_key="t/cache/h/token.n", retention=604_800, body=body)
        assert item == {
            "pk": {"S": PK},
            "sk": {"S": "META"},
            "s3_key": {"S": "t/cache/h/token.n"},
            "generated_at": {"N": "1700000000"},
            "revalidate_seconds": {"N": "60"},
            "ttl": {"N": "1700604860"},
            "generation": {"S": "token"},
            "fetched_at": {"N": "1700000000.25"},
            "fresh_for": {"N": "60"},
            "stale_for": {"N": "10.5"},
            "error_for": {"N": "20"},
            "body_size": {"N": "5"},
        }

    @given(
        fetched=st.floats(1, 4e9),
        terms=st.tuples(*[st.floats(0, 1e8)] * 3),
        mark=st.sampled_from(Mark),
        value=st.sampled_from([None, UNREAD]),
    )
    def test_a_written_row_is_read_to_the_last_digit(
        self, fetched: float, terms: tuple[float, float, float], mark: Mark, value: Any
    ) -> None:
        """To the last digit, whatever the times and terms."""
        copy = Copy("token", fetched, Policy(*terms), value, mark)
        item = meta_item(copy, pk=PK, s3_key="t/cache/h/token.n", retention=0)
        assert row_of(item, fetched).copy == copy

    def test_a_long_life_keeps_its_row(self) -> None:
        """The row is not swept before the copy may not be served any more."""
        copy = Copy("token", NOW, Policy(60, 0, 30 * 86400), b"")
        item = meta_item(copy, pk=PK, s3_key="k", retention=604_800)
        assert item["ttl"] == {"N": str(1_700_000_060 + 30 * 86400)}

    def test_another_languages_row_is_a_copy(self) -> None:
        """Minimal, as the TableTheory libraries write it: stale for as long as it is there."""
        item = FaceTheoryCacheMetadata(PK, "META", "pages/pricing.html", int(NOW), 60).item()
        copy = row_of(item, NOW).copy
        assert copy is not None
        assert (copy.fetched_at, copy.policy.fresh_for, copy.mark) == (NOW, 60, Mark.NONE)
        assert [copy.policy.verdict(NOW, NOW + age) for age in (59, 60, 10**8)] == [
            "fresh",
            "stale",
            "stale",
        ]

    def test_another_generation_under_the_same_key_is_another_copy(self) -> None:
        """Others may write each body to the same place."""
        rows = [
            row_of(FaceTheoryCacheMetadata(PK, "META", "same.html", at, 60).item(), NOW)
            for at in (1_700_000_000, 1_700_000_001)
        ]
        assert rows[0].generation != rows[1].generation

    @pytest.mark.parametrize(
        "change",
        [
            {"s3_key": {"S": "theirs.html"}},
            {"generated_at": {"N": "1700000500"}},
            {"generated_at": {"N": "1700000500"}, "revalidate_seconds": {"N": "10"}},
        ],
    )
    def test_the_schemas_attributes_win(self, change: dict[str, Any]) -> None:
        """Another's update left our attributes as they were: what contradicts does not count."""
        copy = Copy("token", NOW + 0.5, Policy(60, 5), UNREAD)
        item = meta_item(copy, pk=PK, s3_key="t/cache/h/token.n", retention=0) | change
        read = row_of(item, NOW + 500).copy
        assert read is not None
        assert read.generation != "token"
        assert read.fetched_at == float(item["generated_at"]["N"])
        assert read.policy.fresh_for == float(item["revalidate_seconds"]["N"])

    @pytest.mark.parametrize("lacking", ["s3_key", "generated_at", "revalidate_seconds"])
    @pytest.mark.parametrize("instead", [None, {"NULL": True}, {"S": ""}, {"BOOL": True}])
    def test_a_row_that_lacks_what_is_required_is_a_miss(self, lacking: str, instead: Any) -> None:
        """Neither an error, nor a copy of which nobody knows how old it is."""
        item = FaceTheoryCacheMetadata(PK, "META", "k", int(NOW), 60).item()
        del item[lacking]
        if instead is not None:
            item[lacking] = instead
        assert merged(row_of(item, NOW), Lock()) == Record()

    def test_attributes_that_are_not_known_change_nothing(self) -> None:
        """Whatever others keep in their rows."""
        item = FaceTheoryCacheMetadata(PK, "META", "k", int(NOW), 60).item()
        more: dict[str, Any] = {"x": {"M": {"y": {"L": []}}}, "tags": {"S": "no set"}}
        assert row_of(item | more, NOW) == row_of(item, NOW)

    def test_a_failure_comes_back(self) -> None:
        """In either row."""
        for failure in (Failure(3, NOW + 0.5, "TimeoutError"), Failure(1, NOW, "")):
            assert lock_of(failure_attributes(failure)).failure == failure


class TestI3Times:
    def test_a_page_is_fresh_up_to_the_end_of_its_revalidate_seconds(self) -> None:
        """Iff `now < generated_at + revalidate_seconds`; `ttl` has no say in it."""
        meta = FaceTheoryCacheMetadata(PK, "META", "k", int(NOW), 60, ttl=int(NOW) - 10)
        fresh = [meta.is_fresh(NOW + age) for age in (-60, 0, 59.9, 60)]
        assert fresh == [True, True, True, False]

    @pytest.mark.parametrize(("ahead", "verdict"), [(5, "fresh"), (60, "fresh"), (61, "stale")])
    def test_a_writers_clock_may_run_ahead_by_a_minute(self, ahead: int, verdict: str) -> None:
        """Beyond that a copy is stale, or it would be fresh for ever."""
        meta = FaceTheoryCacheMetadata(PK, "META", "k", int(NOW) + ahead, 300)
        copy = row_of(meta.item(), NOW).copy
        assert copy is not None
        assert copy.policy.verdict(copy.fetched_at, NOW) == verdict
        assert meta.is_fresh(NOW) == (verdict == "fresh")

    @given(st.floats(1, 4e9), st.floats(0.001, 100))
    def test_a_lease_is_never_shorter_than_asked(self, now: float, lease_for: float) -> None:
        """`now` is floored and the end ceiled: up to two seconds more, never less."""
        lease = FaceTheoryCacheLease.until(PK, "token", now + lease_for)
        assert lease.is_held(now + lease_for * 0.999)
        assert not lease.is_held(now + lease_for + 2)

    def test_zero_is_an_invalidation_whoever_wrote_it(self) -> None:
        """Another language set `revalidate_seconds` of our row to zero: stale, terms kept."""
        copy = Copy("token", NOW, Policy(60, 30, 90), UNREAD)
        item = meta_item(copy, pk=PK, s3_key="t/cache/h/token.n", retention=0)
        item["revalidate_seconds"] = {"N": "0"}
        read = row_of(item, NOW).copy
        assert read is not None
        assert (read.mark, read.policy) == (Mark.SOFT, copy.policy)

    def test_a_regeneration_by_another_ends_our_mark(self) -> None:
        """A mark counts only while `revalidate_seconds` is zero."""
        copy = Copy("token", NOW, Policy(60), UNREAD, Mark.HARD)
        item = meta_item(copy, pk=PK, s3_key="t/cache/h/token.n", retention=0)
        read = row_of(item | {"revalidate_seconds": {"N": "60"}}, NOW).copy
        assert read is not None
        assert read.mark is Mark.NONE
