"""E8: which tags a change of a mapped table puts into the outbox, in the change's transaction."""

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.errors import StoreError
from stillfresh.integrations.postgres import create_outbox, drop_outbox, outbox_sql
from stillfresh.integrations.postgres.rules import covers
from tests.kit.outbox import PRODUCTS, TABLES, Link, database_at, rows, told, waiting_rows
from tests.kit.servers.postgres import PostgresServer

Three = "INSERT INTO products VALUES (1, 'tea', 'eu'), (2, 'cup', 'eu'), (3, 'pot', 'us')"


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def link(address: str) -> Iterator[Link]:
    with database_at(address, PRODUCTS, tables=TABLES) as link:
        yield link


class TestE8TagsOfAChange:
    def test_a_changed_row_records_the_tags_of_its_columns(self, link: Link) -> None:
        """Inserted, changed and deleted rows: each tag once for a statement."""
        assert told(link, Three) == ["product:1", "product:2", "product:3", "shop:eu", "shop:us"]
        assert told(link, "UPDATE products SET name = 'x' WHERE id = 1") == ["product:1", "shop:eu"]
        assert told(link, "DELETE FROM products WHERE id = 3") == ["product:3", "shop:us"]

    def test_a_changed_column_records_the_old_tag_and_the_new(self, link: Link) -> None:
        """Also for a key."""
        told(link, Three)
        moved = told(link, "UPDATE products SET shop = 'asia', id = 9 WHERE id = 1")
        assert moved == ["product:1", "product:9", "shop:asia", "shop:eu"]

    def test_an_update_of_no_row_records_nothing(self, link: Link) -> None:
        """No row, no tag; NULL in a column makes no tag of that template."""
        assert told(link, "UPDATE products SET name = 'x' WHERE id = 77") == []
        assert told(link, "INSERT INTO products VALUES (5, 'x', NULL)") == ["product:5"]

    def test_a_rollback_records_nothing(self, link: Link) -> None:
        """The row of the outbox is part of the transaction, and of its savepoints."""
        with link.transaction(force_rollback=True):
            link.execute(Three.encode())
        assert told(link) == []
        with link.transaction():
            link.execute("INSERT INTO products VALUES (1, 'tea', 'eu')")
            with link.transaction(force_rollback=True):
                link.execute("INSERT INTO products VALUES (2, 'cup', 'us')")
        assert told(link) == ["product:1", "shop:eu"]

    def test_truncate_records_that_everything_is_stale(self, link: Link) -> None:
        """Nobody knows any more which rows there were."""
        assert told(link, "TRUNCATE products") == [""]

    def test_copy_upsert_and_merge_record_their_rows(self, link: Link) -> None:
        """Whatever statement changes rows."""
        with link.cursor() as cursor, cursor.copy("COPY products FROM STDIN") as copy:
            copy.write("1\ttea\teu\n2\tcup\tus\n")
        assert told(link) == ["product:1", "product:2", "shop:eu", "shop:us"]
        upsert = "INSERT INTO products VALUES (1, 'x', 'eu'), (3, 'y', 'us') ON CONFLICT (id) DO "
        upserted = told(link, f"{upsert} UPDATE SET name = excluded.name")
        assert set(upserted) == {"product:1", "product:3", "shop:eu", "shop:us"}
        merged = told(
            link,
            "MERGE INTO products p USING (VALUES (1), (4)) v (id) ON p.id = v.id"
            " WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (v.id, 'z', 'eu')",
        )
        assert set(merged) == {"product:1", "product:4", "shop:eu"}

    def test_a_cascade_records_the_rows_of_the_child(self, address: str) -> None:
        """A foreign key's own statement fires the triggers of its table."""
        child = (
            "CREATE TABLE parts (id int, of int REFERENCES products ON DELETE CASCADE);"
            "INSERT INTO products VALUES (1, 'tea', 'eu'); INSERT INTO parts VALUES (7, 1)"
        )
        with database_at(address, PRODUCTS, child, tables={"parts": "part:{id}"}) as link:
            assert told(link, "DELETE FROM products") == ["part:7"]

    def test_a_partitioned_table_records_through_its_parent(self, address: str) -> None:
        """A row that moves between partitions tells both tags."""
        made = (
            "CREATE TABLE orders (id int, day text) PARTITION BY LIST (day);"
            "CREATE TABLE monday PARTITION OF orders FOR VALUES IN ('mon');"
            "CREATE TABLE sunday PARTITION OF orders FOR VALUES IN ('sun')"
        )
        with database_at(address, made, tables={"orders": ["order:{id}", "day:{day}"]}) as link:
            inserted = told(link, "INSERT INTO orders VALUES (1, 'mon'), (2, 'sun')")
            assert inserted == ["day:mon", "day:sun", "order:1", "order:2"]
            moved = told(link, "UPDATE orders SET day = 'sun' WHERE id = 1")
            assert moved == ["day:mon", "day:sun", "order:1"]

    def test_a_bulk_change_records_each_tag_once(self, link: Link) -> None:
        """One statement, 5,000 rows, two shops: 5,002 rows in the outbox; the shops alone: two."""
        many = "INSERT INTO products SELECT n, 'x', 's' || n % 2 FROM generate_series(1, 5000) n"
        assert len(told(link, many)) == 5_002
        asyncio.run(create_outbox(address_of(link), {"products": "shop:{shop}"}))
        told(link)
        assert told(link, "UPDATE products SET name = 'y'") == ["shop:s0", "shop:s1"]

    def test_column_values_are_written_as_python_writes_them(self, address: str) -> None:
        """Numbers, text of any kind and UUIDs are written as an f-string writes them."""
        made = 'CREATE TABLE t (a smallint, b bigint, c text, d uuid, "E f" varchar(9))'
        templates = ["a{a}b{b}", "c:{c}", "{d}!", "it's {{{E f}}} \\"]
        values: tuple[Any, ...] = -3, 2**62, "a'b\\{}\n%s é", UUID(int=7), '"q"'
        with database_at(address, made, tables={"t": templates}) as link:
            link.execute("INSERT INTO t VALUES (%s, %s, %s, %s, %s)", values)
            names = dict(zip(["a", "b", "c", "d", "E f"], values, strict=True))
            assert told(link) == sorted(template.format(**names) for template in templates)

    def test_columns_with_collations_can_be_in_a_tag(self, address: str) -> None:
        """Tags are compared byte by byte, and nobody's write fails."""
        made = 'CREATE TABLE t (a text COLLATE "C", b text COLLATE "POSIX")'
        with database_at(address, made, tables={"t": ["a:{a}", "b:{b}", "{a}/{b}"]}) as link:
            assert told(link, "INSERT INTO t VALUES ('x', 'y')") == ["a:x", "b:y", "x/y"]

    def test_a_writers_session_settings_do_not_change_tags(self, address: str) -> None:
        """A backslash is a backslash."""
        with database_at(address, "CREATE TABLE t (a int)", tables={"t": "\\:{a}\\"}) as link:
            link.execute("SET standard_conforming_strings = off")
            assert told(link, "INSERT INTO t VALUES (1)") == ["\\:1\\"]

    def test_a_tag_too_long_for_an_entry_is_left_out(self, link: Link) -> None:
        """Past the bytes that a key's tags may have; the write itself succeeds."""
        link.execute("INSERT INTO products VALUES (1, 'tea', %s)", ("x" * 100_001,))
        assert told(link) == ["product:1"]


def address_of(link: Link) -> str:
    return f"postgresql://postgres@{link.info.host}:{link.info.port}/{link.info.dbname}"


class TestE8Mapping:
    def test_table_and_column_names_follow_sql_quoting(self, address: str) -> None:
        """Folded unless they are quoted, in any schema, also words of SQL."""
        made = (
            'CREATE SCHEMA "My Shop"; CREATE TABLE "My Shop"."Or""der" ("The Id" int);'
            'CREATE TABLE "order" ("user" int)'
        )
        tables = {'"My Shop"."Or""der"': "a:{The Id}", "ORDER": "b:{user}"}
        with database_at(address, made, tables=tables) as link:
            insert = 'INSERT INTO "My Shop"."Or""der" VALUES (1)', 'INSERT INTO "order" VALUES (2)'
            assert told(link, *insert) == ["a:1", "b:2"]

    @pytest.mark.parametrize(
        ("tables", "said"),
        [
            ({"prodcuts": "p:{id}"}, "table 'prodcuts': there is none in this database"),
            ({"products": "p:{idd}"}, "did you mean: id"),
            ({"products": "p:{nothing_near}"}, "did you mean: id, name, shop"),
            ({"products": "{id}"}, "write a name and then columns"),
            ({"products": "p:{}"}, "columns have a name and nothing else"),
            ({"products": "p:{id:04}"}, "columns have a name and nothing else"),
            ({"products": "p:{id"}, "write columns as {id}"),
            ({"products": "$stillfresh$"}, "may hold neither"),
            ({"products": []}, "a template such as 'product:{id}'"),
            ({"products": {"id": "x"}}, "a template such as 'product:{id}'"),
            ({"products": [3]}, "write a name and then columns"),
            ({"products; DROP TABLE products": "p:{id}"}, "write a table's name as SQL has it"),
            ({"a.b.c": "p:{id}"}, "write a table's name as SQL has it"),
            ({"priced": "p:{price}"}, "of type numeric, whose text differs from Python's"),
            ({"shown": "p:{id}"}, "is not a table"),
            ({"products": "p:{id}", "public.products": "q:{id}"}, "name it once"),
        ],
    )
    def test_a_mapping_that_cannot_work_is_refused(
        self, address: str, tables: Any, said: str
    ) -> None:
        """With what was wrong and what to write, and nothing is changed."""
        made = "CREATE TABLE priced (price numeric)", "CREATE VIEW shown AS SELECT * FROM products"
        with database_at(address, PRODUCTS, *made) as link:
            with pytest.raises(ConfigError) as refused:
                asyncio.run(create_outbox(address, tables))
            assert said in str(refused.value)
            assert rows(link, "SELECT to_regnamespace('stillfresh_outbox')") == [(None,)]

    def test_a_virtual_column_in_a_mapping_is_refused(self, address: str) -> None:
        """Triggers see no value in it."""
        with database_at(address) as link:
            if link.info.server_version < 180_000:
                pytest.skip("PostgreSQL 18 has them")
            link.execute("CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a * 2) VIRTUAL)")
            with pytest.raises(ConfigError, match="of type virtual"):
                asyncio.run(create_outbox(address, {"t": "b:{b}"}))

    def test_a_database_with_encoding_sql_ascii_is_refused(
        self, postgres: PostgresServer, address: str
    ) -> None:
        """One row with bytes that are no text would hold up all others."""
        name = address.rpartition("/")[2] + "_ascii"
        postgres.execute(f"CREATE DATABASE {name} ENCODING SQL_ASCII TEMPLATE template0")
        with (
            database_at(f"{address}_ascii", PRODUCTS),
            pytest.raises(StoreError, match="is SQL_ASCII"),
        ):
            asyncio.run(create_outbox(f"{address}_ascii", TABLES))

    def test_creating_the_same_outbox_again_takes_no_lock(self, address: str, link: Link) -> None:
        """Not even a lock is taken: a table that another transaction writes is no obstacle."""
        with psycopg.connect(address) as other:
            other.execute("INSERT INTO products VALUES (1, 'tea', 'eu')")
            asyncio.run(create_outbox(address, TABLES))
        assert told(link) == ["product:1", "shop:eu"]

    def test_another_mapping_replaces_the_triggers(self, address: str, link: Link) -> None:
        """And makes everything stale, since changes before were not told by it."""
        link.execute("CREATE TABLE shops (id int)")
        asyncio.run(create_outbox(address, {"products": "p:{id}", "shops": "s:{id}"}))
        assert told(link) == ["", ""]
        insert = "INSERT INTO products VALUES (1, 'tea', 'eu')", "INSERT INTO shops VALUES (1)"
        assert told(link, *insert) == ["p:1", "s:1"]
        asyncio.run(create_outbox(address, {"shops": "s:{id}"}))
        assert told(link, "DELETE FROM products", "DELETE FROM shops") == ["s:1"]

    def test_a_recreated_table_gets_its_triggers_back(self, address: str, link: Link) -> None:
        """Dropping a table drops its triggers; the next create notices."""
        told(link, "DROP TABLE products", PRODUCTS)
        assert told(link, "INSERT INTO products VALUES (1, 'tea', 'eu')") == []
        asyncio.run(create_outbox(address, TABLES))
        assert told(link, "DELETE FROM products") == ["", "product:1", "shop:eu"]

    def test_creating_an_outbox_gives_up_on_a_table_in_use(
        self, address: str, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others wait behind the one that waits, so it gives up."""
        monkeypatch.setattr(
            "stillfresh.integrations.postgres.setup.ONE_AT_A_TIME",
            "BEGIN; SET LOCAL lock_timeout = 50",
        )
        with psycopg.connect(address) as other:
            other.execute("INSERT INTO products VALUES (1, 'tea', 'eu')")
            with pytest.raises(StoreError, match="a table is in use; try again"):
                asyncio.run(create_outbox(address, {"products": "q:{id}"}))
        assert told(link) == ["product:1", "shop:eu"]

    def test_the_printed_sql_creates_the_same_outbox(self, address: str) -> None:
        """For migration tools: in one transaction, any number of times."""
        with database_at(address, PRODUCTS) as link:
            for _ in range(2):
                link.execute(outbox_sql(TABLES).encode())
            assert told(link, Three)[:2] == ["", "product:1"]

    def test_dropping_the_outbox_leaves_nothing(self, address: str, link: Link) -> None:
        """No trigger, no table; a second time is no mistake."""
        for _ in range(2):
            asyncio.run(drop_outbox(address))
        link.execute(Three.encode())
        query = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'stillfresh%%'"
        assert rows(link, query) == [(0,)]


class TestE8Snapshots:
    @given(st.lists(st.sampled_from(["begin", "end"]), max_size=30), st.data())
    def test_a_later_snapshot_covers_an_earlier_one(self, steps: list[str], data: Any) -> None:
        """Exactly those that miss none of its transactions."""
        running, begun, taken = set[int](), 1, list[tuple[str, set[int]]]()
        ended = set[int]()
        for step in steps:
            if step == "begin":
                running.add(begun)
                begun += 1
            elif running:
                over = data.draw(st.sampled_from(sorted(running)))
                running.discard(over)
                ended.add(over)
            end = max(ended, default=0) + 1
            within = sorted(it for it in running if it < end)
            first = within[0] if within else end
            taken.append((f"{first}:{end}:{','.join(map(str, within))}", set(ended)))
        for seen, has in taken:
            assert [covers(seen, it) for it, _ in taken] == [had <= has for _, had in taken]


class TestE8Rights:
    def test_a_writer_needs_no_rights_on_the_outbox(self, address: str, link: Link) -> None:
        """Nor can it read, write or borrow the function; its search_path leads nowhere."""
        role = f"writer_{link.info.dbname}"
        link.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON products TO {role}".encode())
        link.execute(f"GRANT CREATE ON SCHEMA public TO {role}".encode())
        with psycopg.connect(address.replace("postgres@", f"{role}@"), autocommit=True) as other:
            other.execute(
                "CREATE FUNCTION public.pg_notify(text, text) RETURNS int LANGUAGE sql AS"
                " 'SELECT 1/0'; SET search_path = public, pg_catalog"
            )
            other.execute("INSERT INTO products VALUES (1, 'tea', 'eu')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                other.execute("SELECT * FROM stillfresh_outbox.changed")
            [(name,)] = rows(link, "SELECT proname FROM pg_proc WHERE proname LIKE 'changed\\_%%'")
            other.execute("CREATE TABLE own (id int)")
            link.execute(f"GRANT USAGE ON SCHEMA stillfresh_outbox TO {role}".encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                other.execute(
                    f"CREATE TRIGGER mine AFTER INSERT ON own FOR EACH ROW EXECUTE FUNCTION"
                    f" stillfresh_outbox.{name}()".encode()
                )
        assert told(link) == ["product:1", "shop:eu"]

    def test_a_role_without_rights_gets_a_one_line_error(self, address: str, link: Link) -> None:
        """What was refused and where the rights are listed, without the statement."""
        role = f"reader_{link.info.dbname}"
        link.execute(f"CREATE ROLE {role} LOGIN".encode())
        with pytest.raises(ConfigError) as refused:
            asyncio.run(
                create_outbox(address.replace("postgres@", f"{role}@"), {"products": "all"})
            )
        said = str(refused.value)
        assert said.startswith("InsufficientPrivilege: permission denied for ")
        assert said.endswith("; docs/postgres.md lists the rights it needs")
        assert "\n" not in said


class TestE8Bound:
    OLD = "UPDATE stillfresh_outbox.changed SET at = at - interval '3 hours'"

    def test_without_a_consumer_old_rows_of_the_outbox_are_merged(self, link: Link) -> None:
        """Rows that nobody took for two hours become one: everything is stale."""
        link.execute("INSERT INTO products SELECT n, 'x', 's' FROM generate_series(1, 900) n")
        link.execute(self.OLD.encode())
        assert told(
            link, "INSERT INTO products SELECT n, 'x' FROM generate_series(901, 2000) n"
        ) == [""]

    def test_repeatable_read_writers_leave_old_rows_alone(self, link: Link) -> None:
        """A transaction that is repeatable must not fail on what others drop."""
        link.execute("INSERT INTO products SELECT n, 'x' FROM generate_series(1, 2000) n")
        link.execute(self.OLD.encode())
        with link.transaction():
            link.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            link.execute("DELETE FROM products")
        assert waiting_rows(link) == 4_000

    def test_small_writes_clean_up_old_rows_now_and_then(self, link: Link) -> None:
        """In the end the old rows are dropped all the same."""
        link.execute("INSERT INTO products VALUES (1, 'tea', 'eu')")
        link.execute(self.OLD.encode())
        update = "SELECT count(*) FROM stillfresh_outbox.changed WHERE tag = ''"
        with link.pipeline(), link.transaction():
            link.execute("SELECT setseed(0.5)")
            for number in range(3_000):
                link.execute("UPDATE products SET name = %s", (str(number),))
        assert rows(link, update) == [(1,)]

    def test_notifications_can_be_turned_off(self, link: Link) -> None:
        """PostgreSQL prepares no transaction (two-phase commit) that has notified."""
        link.execute("LISTEN stillfresh_outbox")
        link.execute("SET stillfresh.notify = off")
        assert told(link, "INSERT INTO products VALUES (1, 'tea', 'eu')") == [
            "product:1",
            "shop:eu",
        ]
        link.execute("RESET stillfresh.notify")
        assert told(link, "DELETE FROM products") == ["product:1", "shop:eu"]
        assert len(list(link.notifies(timeout=60, stop_after=1))) == 1
