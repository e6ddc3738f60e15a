"""The recording of Megatron-core that lesson 06 shows where it is not installed."""
import megatron_program
import pytest
from lesson_program import small

import dtlab
from dtlab.data import recordings

pytestmark = [pytest.mark.peers, pytest.mark.ranks]


def test_the_shipped_recording_of_megatron_equals_one_of_the_lessons_program():
    pytest.importorskip("megatron.core")
    with dtlab.launch(megatron_program.NUM_RANKS) as ranks:
        shipped, live = recordings.load("megatron_mlp"), small(megatron_program.record(ranks))
    assert live.communication().equals(shipped.communication())
    assert live.memory().equals(shipped.memory())
    assert live.meta["results"] == shipped.results == [[True, True]] * megatron_program.NUM_RANKS
