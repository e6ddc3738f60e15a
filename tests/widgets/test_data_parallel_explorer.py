"""The explorer of bucket sizes: its numbers, its move, and its marks."""
import pytest

import dtlab
from dtlab.errors import ConfigError


@pytest.fixture
def explorer():
    return dtlab.explore.data_parallel()


def exposed(explorer, **degrees):
    return explorer.set(**degrees).values["exposed_communication_s"]


def test_dragging_the_bucket_first_shrinks_what_is_exposed_then_brings_it_back(explorer):
    sizes = explorer.legal("bucket_bytes")
    seconds = [exposed(explorer, bucket_bytes=size) for size in sizes]
    best = seconds.index(min(seconds))
    assert 0 < best < len(sizes) - 1 and seconds[0] > 3 * seconds[best] and seconds[-1] > 10 * seconds[best]


def test_the_whole_model_in_one_bucket_is_no_overlap(explorer):
    assert exposed(explorer, bucket_bytes=explorer.legal("bucket_bytes")[-1]) == pytest.approx(
        exposed(explorer, bucket_bytes=10**12, overlap=False))


def test_more_sequences_hide_more(explorer):
    assert exposed(explorer, sequences=8) < exposed(explorer, sequences=1) / 10


def test_numbers_belong_together(explorer):
    values = explorer.values
    assert values["step_time_s"] == pytest.approx(values["compute_s"] + values["exposed_communication_s"])
    assert values["tokens_per_s"] == pytest.approx(values["ranks"] * values["sequences"] * 2048 / values["step_time_s"])


def test_a_group_inside_one_node_does_not_feel_the_network(explorer):
    inside = [exposed(explorer, ranks=8, network=name) for name in ("Ethernet 100", "InfiniBand NDR")]
    across = [exposed(explorer, ranks=16, network=name) for name in ("Ethernet 100", "InfiniBand NDR")]
    assert inside[0] == inside[1] and across[0] > 2 * across[1]


def test_an_illegal_bucket_is_refused_with_the_legal_ones(explorer):
    with pytest.raises(ConfigError, match="bucket_bytes=5 is not legal here; legal: 1, 25000000"):
        explorer.set(bucket_bytes=5)


@pytest.mark.ranks
def test_run_puts_measured_marks_on_predicted_columns(explorer):
    assert "measured" not in explorer.svg
    explorer.run()
    said = f"On {len(dtlab.current_ranks() or range(4))} ranks by number of buckets, predicted and measured: 8, after"
    assert "measured" in explorer.svg and said in repr(explorer)
    explorer.set(ranks=8)
    assert "measured" in explorer.svg  # the marks stay when the controls move


@pytest.mark.ranks
def test_a_run_does_not_end_the_one_rank_that_is_live(explorer):
    with dtlab.launch(1) as ranks:
        ranks.run(lambda: globals().update(kept=7))
        with pytest.raises(ConfigError, match=r"2 ranks at least, and 1 is live.*dtlab.launch\(4\)"):
            explorer.run()
        assert ranks.run(lambda: kept) == [7]  # noqa: F821
