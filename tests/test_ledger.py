"""The ledger: rows of lessons run here, shipped rows marked, no column that nothing measured."""
import pandas
import pytest

from dtlab.errors import ConfigError
from dtlab.ledger_table import _TEXTS, _shipped, ledger


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["dtlab.ledger_table"], "_session", {})


class Recording:
    """The two tables of a recording that the ledger reads."""

    def communication(self):
        return pandas.DataFrame({"rank": [0, 1], "op": "all_reduce", "calls": 3, "wire_bytes": [60, 90]})

    def memory(self):
        return pandas.DataFrame({"rank": [0, 1], "peak": [1000, 1200]})


def test_a_lesson_not_run_shows_its_shipped_row_marked():
    table = ledger()
    assert list(table["from"]) == ["shipped"] * len(_TEXTS)
    assert table.loc["00", "collectives per step"] == _shipped()["00"]["collectives per step"]


def test_no_column_that_nothing_measured():
    table = ledger("00", collectives_per_step="1 all_reduce")
    assert table.loc["00", "from"] == "this machine"
    assert not [column for column in table if "bytes" in column or "memory" in column]


def test_a_recording_fills_its_columns_beside_the_formula():
    row = ledger("00", Recording(), formula=8800).loc["00"]
    assert row["collectives per step"] == "3 all_reduce"
    assert list(row[["bytes per rank (formula)", "bytes per rank (recorded)", "memory per rank (peak bytes)"]]) == [
        "8,800", "90", "1,200"]


def test_every_lesson_of_the_table_ships_a_row():
    assert sorted(_shipped()) == sorted(_TEXTS)


@pytest.mark.parametrize("call, words", [(lambda: ledger("99"), "it has 00"),
                                         (lambda: ledger("00", speed=1), "it has collectives_per_step")])
def test_mistakes_list_what_there_is(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
