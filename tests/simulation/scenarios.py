"""Every scenario there is, by name."""

from stillfresh.testing.simulator.simulate import Scenario
from tests.simulation.engine_scenarios import (
    by_late_tags,
    by_tags,
    closed_and_opened,
    cut_off,
    from_memory,
    inside_another,
    of_own_menus,
    of_own_writes,
    of_puts,
    of_updates,
    of_versioned_puts,
    of_write_throughs,
    on_a_file,
    on_a_store_that_tells,
    on_late_requests,
    on_slow_answers,
    over_a_cluster,
    over_a_network,
    set_back,
    while_slots_move,
)
from tests.simulation.feed_scenarios import of_a_feed
from tests.simulation.page_scenarios import of_own_pages, of_pages
from tests.simulation.put_scenarios import (
    of_adds,
    of_counters,
    of_late_puts,
    of_put_steps,
    of_puts_on_a_file,
    of_puts_on_a_server_that_forgets,
    of_puts_over_a_cluster,
    of_puts_under_another_clock,
    of_puts_without_replicas,
    of_tagged_puts,
    of_versions,
)
from tests.simulation.sync_scenarios import of_threads
from tests.simulation.viewer_scenarios import of_a_coordinator, of_a_hub, of_a_watch
from tests.simulation.waiting_scenarios import of_games

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        over_a_network,
        on_a_file,
        from_memory,
        cut_off,
        on_a_store_that_tells,
        over_a_cluster,
        while_slots_move,
        set_back,
        on_late_requests,
        on_slow_answers,
        by_tags,
        by_late_tags,
        of_puts,
        of_updates,
        of_versioned_puts,
        of_write_throughs,
        of_own_writes,
        of_own_menus,
        of_put_steps,
        of_late_puts,
        of_tagged_puts,
        of_versions,
        of_counters,
        of_adds,
        of_puts_on_a_file,
        of_puts_over_a_cluster,
        of_puts_without_replicas,
        of_puts_under_another_clock,
        of_puts_on_a_server_that_forgets,
        inside_another,
        of_threads,
        closed_and_opened,
        of_pages,
        of_own_pages,
        of_a_hub,
        of_a_watch,
        of_a_coordinator,
        of_a_feed,
        of_games,
    )
}
