"""One table for the whole course: a row a lesson, what each technique cuts, sends, keeps and is for.

The measured columns come from what a lesson measured here; a lesson not run on this machine shows the row
that ships with the course (``ledger.json``), marked so. A column that nothing measured is not shown.
"""
import json
from pathlib import Path

from dtlab import notes, shell
from dtlab.errors import ConfigError

_TEXTS = {  # lesson -> technique, what is cut, when to use
    "00": ("data parallel by hand", "the batch", "the model fits one device"),
    "01": ("ring all-reduce", "the tensor", "large tensors, links to neighbours"),
    "02": ("data parallel in buckets", "the batch", "the model fits one device; hides what it sends"),
    "03": ("recomputation", "activations: inputs stay",
           "activations do not fit; a third more FLOPs, or less selectively"),
    "04": ("ZeRO stage 1", "optimizer states (2: gradients, 3: parameters too)",
           "replicas fit but for their states; sends no more than data parallelism"),
    "05": ("FSDP, or ZeRO stage 3 in units", "all states; parameters are gathered unit by unit",
           "states fit no device; enough tokens a rank to hide 1.5 times the bytes"),
    "06": ("tensor parallelism", "every matrix of a layer, heads, vocabulary",
           "layers or activations fit no device; inside a node, whose links are fast"),
    "07A": ("sequence parallelism (Megatron's)", "what tensor parallelism leaves whole: norms, dropout, residual",
            "with tensor parallelism, always"),
    "07B": ("context parallelism in a ring", "the sequence, everywhere",
            "one sequence's activations fit no device; Ulysses instead, up to as many ranks as kv heads"),
}
_MEASURED = ("collectives per step", "bytes per rank (formula)", "bytes per rank (recorded)",
             "memory per rank (peak bytes)")
_session = {}  # lesson -> measured columns of this kernel


def ledger(lesson=None, recording=None, formula=None, **measured):
    """Add this lesson's row and return the table.

    Args:
        lesson: ``"00"``, ``"01"``, ..., ``"07A"``; None only shows the table.
        recording: what the lesson recorded in one step (``communication()``, ``memory()``), if it did.
        formula: bytes each rank sends in a step by the lesson's formula.
        **measured: further measured cells, spaces written as underscores: ``collectives_per_step="3 all_reduce"``.

    Returns:
        pandas.DataFrame, one row a lesson, indexed by lesson; bytes as text, "25,165,824". The column ``from`` says
        where a row's numbers come from: ``this machine``, or ``shipped`` with the course (exact ones only).

    Raises:
        ConfigError: no such lesson or column; the message lists those there are.
    """
    import pandas

    if lesson is not None:
        row = _from_recording(recording) if recording is not None else {}
        row.update(_named(measured))
        if formula is not None:
            row["bytes per rank (formula)"] = formula
        _keep(_known(lesson), row)
    rows = [_row(key) for key in sorted(_TEXTS)]
    table = pandas.DataFrame(rows, dtype=object).set_index("lesson").dropna(axis="columns", how="all")
    return table.where(table.notna(), "-")


def _known(lesson):
    if lesson not in _TEXTS:
        raise ConfigError(f"no lesson {lesson!r} in the ledger; it has {', '.join(sorted(_TEXTS))}")
    return lesson


def _named(measured):
    """Keyword arguments as column names."""
    columns = {name.replace(" ", "_"): name for name in _MEASURED if "(" not in name}
    unknown = set(measured) - set(columns)
    if unknown:
        raise ConfigError(f"the ledger has no column {sorted(unknown)[0]!r}; it has {', '.join(columns)}")
    return {columns[name]: value for name, value in measured.items()}


def _from_recording(recording):
    """The measured columns of one recorded step: calls by operation, the busiest rank's bytes, the highest peak."""
    sent = recording.communication()
    busiest = sent.groupby("rank")["wire_bytes"].sum()
    calls = sent[sent["rank"] == sent["rank"].min()].groupby("op")["calls"].sum()
    return {
        "collectives per step": ", ".join(f"{count} {op}" for op, count in calls.items()),
        "bytes per rank (recorded)": int(busiest.max()),
        "memory per rank (peak bytes)": int(recording.memory()["peak"].max()),
    }


def _keep(lesson, row):
    _session[lesson] = row
    if shell.in_notebook():
        notes.write("ledger", lesson, row)


def _row(lesson):
    """This kernel's row, else the one kept beside the notebook, else the shipped one."""
    kept = notes.read("ledger") if shell.in_notebook() else {}
    measured = _session.get(lesson) or kept.get(lesson)
    technique, cut, use = _TEXTS[lesson]
    source = "this machine" if measured else "shipped"
    measured = measured or _shipped().get(lesson, {})
    return {"lesson": lesson, "technique": technique, "what is cut": cut,
            **{name: _said(measured.get(name)) for name in _MEASURED}, "when to use": use, "from": source}


def _said(value):
    return f"{value:,}" if isinstance(value, (int, float)) else value


def _shipped():
    return json.loads(Path(__file__).with_name("ledger.json").read_text(encoding="utf-8"))
