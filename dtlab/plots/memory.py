"""The bytes that live on a rank over a step: categories on each other, as operations come and go."""
from itertools import groupby

from dtlab.errors import ConfigError
from dtlab.plots.svg import COLOURS, document, label, legend, line, tick_step
from dtlab.simulate.events import CATEGORIES
from dtlab.theory.units import in_binary_units

_WIDTH, _TOP, _HEIGHT, _LEFT, _RIGHT, _COLUMN = 650, 46, 170, 66, 12, 2
_WORDS = {"optimizer_states": "optimizer states"}


def memory(recording, *, rank=None):
    """Draw what lives on a rank over what it did, the most where several operations share a place.

    An operation is as wide as the bytes it reads and writes, so the picture is the same on every machine, and dry
    recordings have one. Names above say where forward, backward, the optimizer or a phase begins.

    Args:
        recording: a ``Recording``, live or dry.
        rank: the rank to draw; the first recorded one if not given.

    Returns:
        Svg, 650 units wide.

    Raises:
        ConfigError: the rank was not recorded, or it did nothing.
    """
    rank = recording.ranks[0] if rank is None else rank
    if not any(event.kind == "compute" and event.bytes for event in recording.events.get(rank, ())):
        raise ConfigError(f"rank {rank} has no operations in this recording; it has ranks {recording.ranks}")
    places, phases = _read(recording.events[rank], (_WIDTH - _LEFT - _RIGHT) // _COLUMN)
    most = max(map(sum, places))
    step = tick_step(most * 1.05 / 2**20, 3) * 2**20
    top, bottom = step * -(-most * 1.05 // step), _TOP + _HEIGHT
    parts = list(legend(CATEGORIES, _LEFT, words=_WORDS))
    for number in range(round(top / step) + 1):
        y = round(bottom - number * step / top * _HEIGHT, 1)
        parts += [line(_LEFT, y, _WIDTH - _RIGHT, y, stroke="#C8C8C8", width=1),
                  label(_LEFT - 6, y + 4, f"{number * step / 2**20:.4g}", anchor="end")]
    for depth in range(len(CATEGORIES), 0, -1):  # the whole first, then what lies below covers it
        parts.append(_area([bottom - sum(place[:depth]) / top * _HEIGHT for place in places], bottom,
                           COLOURS[CATEGORIES[depth - 1]]))  # fmt: skip
    for (place, name), (end, _) in zip(phases, [*phases[1:], (len(places), "")]):
        x, room = _LEFT + place * _COLUMN, (end - place) * _COLUMN
        parts += [line(x, _TOP - 14, x, bottom, dash="3 3", width=1),
                  label(x + 4, _TOP - 4, name if room > 6.2 * len(name) else name[0].upper())]
    parts.append(f'<text transform="translate(14 {_TOP + _HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
                 f'font-size="13" fill="{COLOURS["outline"]}">live [MiB]</text>')
    parts.append(label((_LEFT + _WIDTH) / 2, bottom + 18, "operations in order, as wide as the bytes they touch",
                       anchor="middle", size=13))  # fmt: skip
    at_peak = ", ".join(f"{name} {in_binary_units(size)}" for name, size in zip(CATEGORIES, max(places, key=sum)))
    return document(parts, width=_WIDTH, height=bottom + 26, title=f"Live memory of rank {rank}",
                    text=f"Rank {rank}, live memory over {', '.join(name for _, name in phases)}. At the peak, "
                         f"{in_binary_units(most)}: {at_peak}.")  # fmt: skip


def _area(heights, bottom, colour):
    """A filled area under steps; neighbours of one height are one step."""
    path, x = "", _LEFT
    for y, same in groupby(round(height, 1) for height in heights):
        x += _COLUMN * len(list(same))
        path += f"V{y}H{x}"
    return (f'<path d="M{_LEFT} {bottom}{path}V{bottom}Z" fill="{colour}" stroke="{COLOURS["outline"]}" '
            'stroke-width="0.5"/>')


def _read(events, num_places):
    """What lives at each place of the picture (bytes by category), and ``(place, name)`` where a phase begins."""
    from dtlab.simulate.tables import live_bytes  # needs pandas, which a reader of other pictures need not have

    total, done, phases = sum(event.bytes for event in events if event.kind == "compute"), 0, []
    places, now = [], (0,) * len(CATEGORIES)

    def passing():
        nonlocal done
        for event in events:
            if event.kind == "compute":
                name = event.phase.get("name")
                if name and name != (phases or [("", "")])[-1][1]:
                    phases.append((done * num_places // total, name))
                done += event.bytes
            yield event

    for _, live in live_bytes(passing()):
        place = min(done * num_places // total, num_places - 1)
        places += [now] * (place + 1 - len(places))
        now = tuple(live.values())
        places[place] = max(places[place], now, key=sum)
    return places + [now] * (num_places - len(places)), phases
