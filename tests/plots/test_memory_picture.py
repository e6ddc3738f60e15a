"""Live memory over a step: areas as tall as the bytes, phases where they begin."""
import re

import pytest

from dtlab.errors import ConfigError
from dtlab.plots import memory
from dtlab.plots.svg import COLOURS
from dtlab.simulate.events import Event, Recording

MIB = 2**20


def event(kind, **more):
    return Event(kind, kind, 0.0, 0.0, **more)


def step():
    """10 MiB of parameters; 20 MiB of activations live during forward (3 of 4 MiB touched), then go."""
    return [event("alloc", storage=0, bytes=10 * MIB, category="params"),
            event("alloc", storage=1, bytes=20 * MIB, category="activations"),
            event("compute", bytes=3 * MIB, phase={"name": "forward"}),
            event("free", storage=1, bytes=20 * MIB),
            event("compute", bytes=1 * MIB, phase={"name": "backward"})]  # fmt: skip


def area(picture, kind):
    """``[(height in units, until which x), ...]`` of the area of one kind."""
    (path,) = re.findall(rf'<path d="M66 216(\S+)V216Z" fill="{COLOURS[kind]}"', str(picture))
    return [(216 - float(y), int(x)) for y, x in re.findall(r"V([\d.]+)H(\d+)", path)]


def test_areas_are_as_tall_as_their_bytes_and_lie_on_each_other():
    picture = memory(Recording({0: step()}))
    ((params, end),), ((both, peak_end), (after, _)) = area(picture, "params"), area(picture, "activations")
    assert end == 638 and after == params and abs(both / params - 3) < 0.01
    assert peak_end - 66 == 2 * (3 * 286 // 4 + 1)  # three quarters of 286 columns, and the one it ends in
    assert "At the peak, 30 MiB: params 10 MiB, grads 0 B" in repr(picture)


def test_a_phase_is_named_where_its_first_operation_begins():
    found = re.findall(r'<text x="(\d+)" y="42"[^>]*>(\w+)<', str(memory(Recording({0: step()}))))
    assert found == [("70", "forward"), (str(66 + 2 * (3 * 286 // 4) + 4), "backward")]


def test_what_is_other_is_called_so_and_takes_no_letter_from_the_optimizer():
    picture = str(memory(Recording({0: step()})))
    assert ">other<" in picture and re.findall(r'font-weight="bold"[^>]*>(.*?)<', picture) == ["P", "G", "O", "A", ""]


def test_a_rank_that_was_not_recorded_is_refused():
    with pytest.raises(ConfigError, match=r"rank 2 has no operations in this recording; it has ranks \[0\]"):
        memory(Recording({0: step()}), rank=2)
