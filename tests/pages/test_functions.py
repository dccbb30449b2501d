"""I22: functions that freeze (Lambda), and what is deployed for them."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hcl2
import pytest
import yaml

from stillfresh import Cache, Verdict
from stillfresh.errors import ConfigError
from stillfresh.pages import Page, PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy" / "aws"
ROLES = ("Read", "Render", "Evict", "Create")


class TestI22Settled:
    async def test_settled_waits_for_background_renders(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """It is published when `settled` returns."""
        assert await pages.settled()
        await pages.get("/a", site.render, revalidate=60)
        clock.advance(61)
        assert (await pages.get("/a", site.render, revalidate=60)).body == b"page 1"
        assert await pages.settled()
        page = await pages.get("/a", site.render, revalidate=60)
        assert (page.body, page.verdict, site.renders) == (b"page 2", Verdict.FRESH, 2)

    async def test_settled_waits_no_longer_than_its_timeout(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Then it says so, and the render goes on."""
        await pages.get("/a", site.render, revalidate=60)
        clock.advance(61)
        site.hold()
        await pages.get("/a", site.render, revalidate=60)
        assert not await pages.settled("10ms")
        assert not await pages.settled(timeout=0)
        site.let_go()
        assert await pages.settled()
        assert (await pages.get("/a", site.render, revalidate=60)).body == b"page 2"

    async def test_settled_raises_nothing_for_a_failed_render(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Nothing is raised: the old page goes on."""
        await pages.get("/a", site.render, revalidate=60)
        clock.advance(61)
        site.error = RuntimeError("down")
        await pages.get("/a", site.render, revalidate=60)
        assert await pages.settled()
        assert site.renders == 2

    async def test_without_stale_for_nothing_runs_in_the_background(
        self, clock: ManualClock
    ) -> None:
        """The visitor waits for the render instead."""
        site = Site(clock)
        async with PageCache("memory://", stale_for=0, clock=clock) as pages:
            await pages.get("/a", site.render, revalidate=60)
            clock.advance(61)
            assert (await pages.get("/a", site.render, revalidate=60)).body == b"page 2"
            assert await pages.settled(0)

    async def test_settled_refuses_a_bad_timeout(self, pages: PageCache) -> None:
        """As everywhere."""
        with pytest.raises(ConfigError, match="timeout"):
            await pages.settled("soon")


class Context:
    """What Lambda tells a function."""

    def get_remaining_time_in_millis(self) -> int:
        return 20_000


class TestI22Handler:
    def test_the_lambda_handler_in_the_docs_serves_and_renders(
        self, aws: "Aws", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Called twice, it answers from one render; a stale page is new when it has returned."""
        text = (ROOT / "docs" / "facetheory.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        [source] = [block for block in blocks if "def handler" in block]
        source = source.replace("site-cache", aws.new_table()).replace("site-pages", aws.bucket)
        source = source.replace("PageCache(", 'PageCache(store_timeout="30s", store=', 1)
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", aws.endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", aws.s3_endpoint)
        block: dict[str, Any] = {"__name__": "block"}
        exec(compile(source, "handler", "exec"), block)  # noqa: S102 (our own page)
        pages, handler, made = block["pages"], block["handler"], list[str]()

        async def render() -> Page:
            made.append("page")
            return Page(f"page {len(made)}", 404, {"content-type": "text/plain"})

        block["render"] = render
        try:
            answers = [handler({"rawPath": "/pricing"}, Context()) for _ in range(2)]
            assert made == ["page"]
            expected = {"statusCode": 404, "body": "cGFnZSAx", "isBase64Encoded": True}
            assert answers == [{**expected, "headers": {"content-type": "text/plain"}}] * 2
            block["runner"].run(pages.revalidate("/pricing"))
            assert handler({"rawPath": "/pricing"}, Context())["body"] == "cGFnZSAx"
            assert made == ["page", "page"]
            assert handler({"rawPath": "/pricing"}, Context())["body"] == "cGFnZSAy"
        finally:
            block["runner"].run(pages.close())
            block["runner"].close()


Asked = list[tuple[str, dict[str, Any]]]
BY_ACTION = {"Put": "PutItem", "Update": "UpdateItem", "Delete": "DeleteItem"}
S3_ACTIONS = {
    "get_object": {"s3:GetObject", "s3:ListBucket"},  # the second tells a missing one from a denied
    "head_object": {"s3:GetObject", "s3:ListBucket"},
    "put_object": {"s3:PutObject"},
    "copy_object": {"s3:GetObject", "s3:PutObject"},
    "delete_objects": {"s3:DeleteObject"},
    "list_objects_v2": {"s3:ListBucket"},
    "head_bucket": {"s3:ListBucket"},
    "create_bucket": {"s3:CreateBucket"},
}


def actions_of(asked: Asked) -> set[str]:
    """What IAM has to allow for these requests."""
    found: set[str] = set()
    for operation, arguments in asked:
        if operation in S3_ACTIONS:
            found |= S3_ACTIONS[operation]
        elif operation == "transact_write_items":
            verbs = {verb for item in arguments["TransactItems"] for verb in item}
            found |= {f"dynamodb:{BY_ACTION[verb]}" for verb in verbs}
        else:
            found.add(f"dynamodb:{operation.title().replace('_', '')}")
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Every request that is made of DynamoDB and S3."""
    from stillfresh.stores.aws import AwsService  # noqa: PLC0415 (only where it is installed)

    real, found = AwsService._once, list[tuple[str, dict[str, Any]]]()

    async def once(self: Any, operation: str, then: Any, arguments: Any, until: float) -> Any:
        found.append((operation, dict(arguments)))
        return await real(self, operation, then, arguments, until)

    monkeypatch.setattr(AwsService, "_once", once)
    return found


def statements() -> dict[str, dict[str, Any]]:
    policy = json.loads((DEPLOY / "policy.json").read_text())
    return {it["Sid"]: it for it in policy["Statement"]}


def allowed(role: str) -> set[str]:
    """What this role is allowed beside `Read`."""
    found = [it["Action"] for sid, it in statements().items() if sid.startswith(role)]
    return {action for actions in found for action in actions}


def tagged(loader: Any, suffix: str, node: Any) -> dict[str, str]:
    """CloudFormation's: `!Sub x` is `{"!Sub": "x"}`."""
    return {f"!{suffix}": str(loader.construct_scalar(node))}


async def nothing(ids: list[str]) -> dict[str, int]:
    """Every id is absent."""
    del ids
    return {}


SafeYaml: Any = type("SafeYaml", (yaml.SafeLoader,), {})
SafeYaml.add_multi_constructor("!", tagged)


def bare(text: Any) -> Any:
    """python-hcl2 leaves the quotes of a text where they were."""
    return text.strip('"') if isinstance(text, str) else text


class TestI22Permissions:
    async def use(self, aws: "Aws", table: str, role: str, asked: Asked) -> set[str]:
        clock, site = ManualClock(start=1_700_000_000.0), Site(ManualClock())
        slow: dict[str, Any] = {"clock": clock, "store_timeout": "30s"}
        store: dict[str, Any] = {"delete_after": 0}
        async with PageCache(aws.store(table, clock, **store), **slow) as pages:
            for path in ("/a", "/b"):
                await pages.get(path, site.render, revalidate=60, tags=["t"])
            short = pages.cache.batched("short", fresh_for=1)(nothing)
            await short.get("a")
        asked.clear()
        if role == "Create":
            from stillfresh.stores.aws import AwsPlace  # noqa: PLC0415
            from stillfresh.stores.dynamodb import admin  # noqa: PLC0415

            place = AwsPlace(None, aws.endpoint, aws.s3_endpoint)
            await admin.create(f"{table}-2", f"{table}-2", place)
            return actions_of(asked)
        async with PageCache(aws.store(table, clock, **store), **slow) as pages:
            if role == "Read":
                await pages.get("/a", site.render, revalidate=60)
                await pages.resource.core.renewals.refresh_times(
                    [pages.key(it, it, ()) for it in ("/a", "/b")]
                )
            elif role == "Render":
                await self.render(pages, site, clock)
            else:
                for seconds in (10, 10**9):  # an entry that was just written leaves a trace
                    clock.advance(seconds)
                    await pages.cache.evict()
                await pages.cache.entries("page")
                await pages.stats()
        return actions_of(asked)

    @staticmethod
    async def render(pages: PageCache, site: Site, clock: ManualClock) -> None:
        """All that writes: a render, a failure, the three kinds of invalidation."""
        clock.advance(61)
        await pages.get("/a", site.render, revalidate=60, tags=["t"])
        await pages.settled()
        clock.advance(61)
        site.error = RuntimeError("down")
        await pages.get("/a", site.render, revalidate=60, tags=["t"])
        await pages.settled()
        await pages.revalidate("/a")
        await pages.revalidate_tag("t")
        await pages.purge("/b")

    @pytest.mark.parametrize("role", ROLES)
    async def test_the_iam_policy_names_exactly_the_actions_of_a_run(
        self, aws: "Aws", asked: Asked, role: str
    ) -> None:
        """As recorded: no action too few, and none too many."""
        used = await self.use(aws, aws.new_table(), role, asked)
        assert used | allowed("Read") == allowed("Read") | allowed(role)
        if role == "Read":
            assert used == allowed("Read")
        else:
            assert allowed(role) <= used
            assert not allowed(role) & allowed("Read")

    def test_each_iam_action_has_its_resource(self) -> None:
        """The table, the bucket, or the objects in it."""
        objects = {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
        for it in statements().values():
            for action in it["Action"]:
                kind = "${bucket_arn}/*" if action in objects else "${bucket_arn}"
                expected = "${table_arn}" if action.startswith("dynamodb:") else kind
                assert (it["Effect"], it["Resource"]) == ("Allow", expected)

    async def test_the_table_in_the_docs_equals_the_iam_policy(self) -> None:
        """docs/facetheory.md, row by row."""
        text = (ROOT / "docs" / "facetheory.md").read_text()
        for role in ROLES:
            [row] = re.findall(rf"^\| `{role}` \|(.*)\|$", text, re.MULTILINE)
            _, dynamodb, s3 = row.split("|")
            named = {f"dynamodb:{it}" for it in re.findall(r"`(\w+)`", dynamodb)}
            named |= {f"s3:{it}" for it in re.findall(r"`(\w+)`", s3)}
            assert named == allowed(role)


class TestI22Templates:
    async def test_the_templates_define_the_table_that_the_code_creates(
        self, aws: "Aws", asked: Asked
    ) -> None:
        """Keys, types, payment and TTL, in both templates, as `stillfresh table create` has it."""
        from stillfresh.stores.aws import AwsPlace  # noqa: PLC0415
        from stillfresh.stores.dynamodb import admin  # noqa: PLC0415

        name = aws.new_table() + "-3"
        await admin.create(name, None, AwsPlace(None, aws.endpoint, aws.s3_endpoint))
        made = next(it for operation, it in asked if operation == "create_table")
        ttl = next(it for operation, it in asked if operation == "update_time_to_live")
        made["TimeToLiveSpecification"] = ttl["TimeToLiveSpecification"]
        del made["TableName"]
        properties = cloudformation()["Table"]["Properties"]
        assert {**properties, "TableName": None} == {**made, "TableName": None}
        table = terraform("aws_dynamodb_table")
        assert bare(table["billing_mode"]) == made["BillingMode"]
        keys = {bare(table["hash_key"]): "HASH", bare(table["range_key"]): "RANGE"}
        assert keys == {it["AttributeName"]: it["KeyType"] for it in made["KeySchema"]}
        types = {bare(it["name"]): bare(it["type"]) for it in table["attribute"]}
        assert types == {
            it["AttributeName"]: it["AttributeType"] for it in made["AttributeDefinitions"]
        }
        [ttl] = table["ttl"]
        assert (bare(ttl["attribute_name"]), ttl["enabled"]) == ("ttl", True)

    def test_the_cloudformation_policies_equal_the_iam_policy(self) -> None:
        """Statement by statement; the table makes itself, so that nobody need create it."""
        arns = {
            "${table_arn}": {"!GetAtt": "Table.Arn"},
            "${bucket_arn}": {"!GetAtt": "Bucket.Arn"},
        }
        arns["${bucket_arn}/*"] = {"!Sub": "${Bucket.Arn}/*"}
        resources, found = cloudformation(), dict[str, Any]()
        for role in ("Read", "Render", "Evict"):
            policy = resources[role]["Properties"]["PolicyDocument"]
            assert policy["Version"] == "2012-10-17"
            assert all(it["Sid"].startswith(role) for it in policy["Statement"])
            found |= {it["Sid"]: it for it in policy["Statement"]}
        expected = {sid: it for sid, it in statements().items() if not sid.startswith("Create")}
        assert found == {
            sid: {**it, "Resource": arns[it["Resource"]]} for sid, it in expected.items()
        }

    def test_the_terraform_policies_equal_the_iam_policy(self) -> None:
        """It reads the same file, and takes a role's statements out of it."""
        text = (DEPLOY / "main.tf").read_text()
        assert 'templatefile("${path.module}/policy.json"' in text
        policy = terraform("aws_iam_policy")
        assert [bare(it) for it in re.findall(r'"(\w+)"', str(policy["for_each"]))] == [*ROLES[:3]]
        assert "startswith(it.Sid, each.key)" in text

    def test_the_lifecycle_rule_keeps_bodies_longer_than_their_pages(self) -> None:
        """The rule deletes later than any page by default: its ttl is a week after it is stale."""
        rule = cloudformation()["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"][0]
        text = (DEPLOY / "site-cache.yaml").read_text()
        template = yaml.load(text, SafeYaml)  # noqa: S506 (a safe loader)
        assert (rule["Status"], rule["ExpirationInDays"]) == ("Enabled", {"!Ref": "BodyDays"})
        assert template["Parameters"]["BodyDays"]["Default"] == 30
        [rule] = terraform("aws_s3_bucket_lifecycle_configuration")["rule"]
        assert bare(rule["status"]) == "Enabled"
        assert "body_days" in str(rule["expiration"])
        assert re.search(r'"body_days" \{[^}]*default *= 30\b', (DEPLOY / "main.tf").read_text())

    def test_the_bucket_of_the_templates_is_not_public(self) -> None:
        """Pages may be anybody's, the bucket is not."""
        blocked = cloudformation()["Bucket"]["Properties"]["PublicAccessBlockConfiguration"]
        assert list(blocked.values()) == [True] * 4
        block = terraform("aws_s3_bucket_public_access_block")
        assert [block[it] for it in block if "public" in it] == [True] * 4


def cloudformation() -> dict[str, Any]:
    text = (DEPLOY / "site-cache.yaml").read_text()
    found: dict[str, Any] = yaml.load(text, SafeYaml)["Resources"]  # noqa: S506 (a safe loader)
    return found


def terraform(kind: str) -> dict[str, Any]:
    """The one resource of this kind."""
    whole = hcl2.loads((DEPLOY / "main.tf").read_text())
    [named] = [it[key] for it in whole["resource"] for key in it if bare(key) == kind]
    [found] = named.values()
    return {str(name): it for name, it in found.items()}


async def test_i22_a_cache_needs_no_other_permissions_than_pages(aws: "Aws", asked: Asked) -> None:
    """`Cache` reads and loads with the same permissions."""
    async with Cache(aws.store(aws.new_table(), ManualClock(1_700_000_000.0))) as cache:

        @cache.batched("price", fresh_for="1m")
        async def price(keys: list[str]) -> dict[str, str]:
            return {key: key for key in keys}

        for _ in range(2):
            assert (await price.get_many(["a", "b"]))["a"].value == "a"
        await price.put("a", "c")
        await price.invalidate("b")
    assert actions_of(asked) <= allowed("Read") | allowed("Render")
