"""T5: the gateway against requests that schemathesis makes up from its own OpenAPI document.

In process, through the app's own door. Whatever is asked, within the document's terms or outside
of them: only statuses, content types, header fields and shapes that the document has.
"""

from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillfresh.gateway import Gateway, gateway
from stillfresh.systems.coordinator import Kind
from tests.kit.examples import examples

if TYPE_CHECKING:
    from schemathesis import Case

CASES = settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
KNOWN = {"ada's": "ada"}
TOKENS = st.sampled_from([None, *KNOWN, "sekret"])
turn = count()


async def views(ids: list[str], viewer_id: str = "") -> dict[str, Any]:
    """One time found, one time absent, one time failing."""
    if next(turn) % 3 == 1:
        return {}
    answer = ConnectionError("away") if next(turn) % 5 == 2 else {"viewer": viewer_id}
    return dict.fromkeys(ids, answer)


def viewer_of(token: str) -> str | None:
    return KNOWN.get(token)


def app() -> Gateway:
    """Ada is known by her token; nobody else is."""
    kinds = [
        Kind("post", fetch=views, fresh_for="1h"),
        Kind("inbox", fetch=views, fresh_for="1h", per_viewer=True),
    ]
    return gateway(kinds=kinds, token="sekret", authenticate=viewer_of)  # noqa: S106


@cache
def cases(*, valid: bool) -> "st.SearchStrategy[Case[Any]]":
    """Of every operation."""
    import schemathesis  # noqa: PLC0415 (half a second, for this test alone)

    schema = schemathesis.openapi.from_asgi("/openapi.json", app())
    modes = schemathesis.GenerationMode
    mode = modes.POSITIVE if valid else modes.NEGATIVE
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    return st.one_of(
        [it.as_strategy(mode) for it in operations if valid or it.body or it.path_parameters]
    )


class TestT5OpenApi:
    @CASES
    @given(st.data())
    def test_valid_requests_are_answered_as_the_openapi_description_says(
        self, data: st.DataObject
    ) -> None:
        """Every status, content type, header field and body is one of those it lists."""
        check(data.draw(cases(valid=True)), data.draw(TOKENS))

    @CASES
    @given(st.data())
    def test_invalid_requests_are_refused_as_the_openapi_description_says(
        self, data: st.DataObject
    ) -> None:
        """With a 4xx that it lists, never with a mistake of ours."""
        check(data.draw(cases(valid=False)), data.draw(TOKENS))


def check(case: "Case[Any]", token: str | None) -> None:
    """A 503 is no mistake where the document has it: its upstream is unavailable."""
    from schemathesis import checks  # noqa: PLC0415

    headers = None if token is None else {"Authorization": f"Bearer {token}"}
    case.call_and_validate(headers=headers, excluded_checks=[checks.not_a_server_error])
