"""Record in this process, without ranks."""
from dtlab.record import recorder
from dtlab.record.results import join
from dtlab.simulate.tables import live_bytes


def record_here(function, *args):
    """A Recording of one rank with ``function(*args)``."""
    answer = recorder.record(lambda: function(*args), (function, args))
    return join([answer], [0], 1)


def live_at_end(recording, rank=0):
    """Category -> bytes that are live when the recording ends."""
    live = {}
    for _, held in live_bytes(recording.events[rank]):
        live = dict(held)
        assert min(held.values()) >= 0, held
    return live


def calls(recording, rank=0):
    """Op -> (calls, tensor_bytes, wire_bytes) of one rank, all groups together."""
    table = recording.communication()
    table = table[table["rank"] == rank].groupby("op")[["calls", "tensor_bytes", "wire_bytes"]].sum()
    return {op: tuple(row) for op, row in zip(table.index, table.itertuples(index=False))}
