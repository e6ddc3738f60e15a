"""What a reader did, kept beside the notebook: answers to predictions, rows of the ledger.

One small JSON file in the kernel's folder, so that a restarted kernel and the next lesson still know it.
Only a notebook that somebody watches reads and writes it: headless output is the same every time.
"""
import json
from pathlib import Path

FILE = ".dtlab.json"


def read(section, folder="."):
    """The notes of one section, {} where there are none or they cannot be read."""
    return _load(folder).get(section, {})


def write(section, key, value, folder="."):
    """Keep one note; a folder that cannot be written costs only the memory beyond this session."""
    notes = _load(folder)
    notes.setdefault(section, {})[key] = value
    _save(notes, folder)


def forget(lesson, folder="."):
    """Drop all notes of one lesson ("00": its predictions "00.1", ... and its ledger row)."""
    notes = _load(folder)
    kept = {name: {key: value for key, value in section.items() if key.split(".")[0] != lesson}
            for name, section in notes.items()}
    if kept != notes:
        _save(kept, folder)


def _load(folder):
    try:
        notes = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _save(notes, folder):
    path = Path(folder) / FILE
    try:
        path.with_suffix(".new").write_text(json.dumps(notes, indent=1, sort_keys=True), encoding="utf-8")
        path.with_suffix(".new").replace(path)
    except OSError:
        pass
