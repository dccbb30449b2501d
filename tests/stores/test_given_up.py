"""S15: requests for leases that a process has given up; no server."""

import pytest

from stillfresh.stores import given_up
from stillfresh.stores.given_up import GivenUpRequests


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(given_up, "time", clock)
    return clock


class TestS15GivenUpRequests:
    def test_a_lease_is_known_by_how_its_token_begins(self, clock: Clock) -> None:
        """For the time of the lease and a minute: a request may be on its way for so long."""
        requests = GivenUpRequests(4)
        assert not requests
        requests.give_up(["ours"], lease_for=10)
        assert requests
        assert requests.is_left_behind("ours-and-the-servers-part")
        assert requests.is_left_behind("ours")
        assert not requests.is_left_behind("theirs")
        clock.now += 69.9
        assert requests.is_left_behind("ours")
        clock.now += 0.1
        assert not requests
        assert not requests.is_left_behind("ours")

    @pytest.mark.usefixtures("clock")
    def test_a_request_that_was_sent_again_is_given_up_when_its_lease_ends(self) -> None:
        """Not before: this process may load under it. One that was sent once never is."""
        requests = GivenUpRequests(4)
        requests.note_sent_again(["ours"], lease_for=10)
        assert not requests.is_left_behind("ours-1")
        requests.note_end("once-1")
        assert not requests.is_left_behind("once-1")
        requests.note_end("ours-1")
        assert requests.is_left_behind("ours-2")

    @pytest.mark.usefixtures("clock")
    def test_a_lease_that_was_taken_is_held_until_it_ends(self) -> None:
        """Its late request may come once more after that."""
        requests = GivenUpRequests(4)
        requests.give_up(["ours"], lease_for=10)
        requests.take("ours", lease_for=10)
        assert not requests.is_left_behind("ours-1")
        requests.note_end("ours-1")
        assert requests.is_left_behind("ours-2")

    def test_a_limited_number_of_given_up_requests_is_remembered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The oldest are forgotten: their leases end by themselves."""
        monkeypatch.setattr(given_up, "MOST_REMEMBERED", 3)
        requests = GivenUpRequests(1)
        requests.give_up("abcd", lease_for=10)
        assert [requests.is_left_behind(it) for it in "abcd"] == [False, True, True, True]
