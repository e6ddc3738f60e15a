"""The sentences of errors and the folding of output, from made-up cells."""
import pytest

from dtlab import HangError, RankError
from dtlab.ranks import report
from dtlab.ranks.board import COLLECTIVE, Call
from dtlab.ranks.monitor import Look, Wait
from dtlab.ranks.relay import KEPT_CHARS, Relay


def described(kind="ValueError", message="boom", line=3, lost=False):
    frames = [("cell [2]", line, "f", "    raise ValueError('boom')")]
    return {"type": kind, "message": message, "frames": frames, "traceback": "Traceback ...", "stopped": False,
            "lost_peer": lost, "ours": False, "name": None}  # fmt: skip


def lines(error):
    return str(error).splitlines()


def test_the_cause_comes_first_with_its_line():
    error = report.failure(4, {1: described()}, 1, [0, 2, 3], {}, "")
    assert lines(error)[:2] == ["rank 1 of 4 failed: ValueError: boom", "  cell [2], line 3, in f"]
    assert lines(error)[-1].startswith("ranks 0, 2-3: stopped because rank 1 failed")
    assert (error.rank, error.cause, error.stopped) == (1, "ValueError", (0, 2, 3)) and 1 in error.tracebacks


def test_the_calls_of_stopped_ranks_are_told():
    error = report.failure(3, {1: described()}, 1, [0, 2], {0: "all_reduce at cell [2], line 5"}, "")
    assert "all_reduce at cell [2], line 5" in str(error)


def test_equal_errors_are_told_once_and_others_by_themselves():
    failures = {0: described(), 1: described(), 2: described("KeyError", "'x'", 9)}
    error = report.failure(3, failures, 0, [], {}, "")
    assert lines(error)[0] == "ranks 0-1 of 3 failed: ValueError: boom"
    assert "rank 2 failed too: KeyError: 'x'" in lines(error) and str(error).count("boom'") <= 1


def test_a_death_is_told_with_its_likely_cause():
    error = report.failure(2, {0: report.described(report.DIED, report.died_text(-9))}, 0, [1], {}, "What is left.")
    assert lines(error)[0] == "rank 0 of 2 died: signal 9 (killed, often because memory ran out)"
    assert lines(error)[-1] == "What is left." and error.cause == "died"


@pytest.mark.parametrize("status, text", [
    (0, "its process ended with exit code 0"), (None, "its process ended"), (-15, "signal 15 (terminated)"),
    (-7, "signal 7 (bus error (shared memory ran out?))"), (-40, "signal 40"),
])  # fmt: skip
def test_ways_to_die(status, text):
    assert report.died_text(status) == text


def test_a_hint_follows_the_cause():
    error = report.failure(2, {0: described("NameError", "name 'x' is not defined")}, 0, [1], {}, "", "push it")
    assert "push it" in lines(error)


def wait(op, missing, line=1):
    return Wait(Call(0, 1, 0, COLLECTIVE, -1, 0, op, f"cell [4], line {line}", "4 float32", (0, 1, 2)), missing)


def test_a_skipped_call_names_op_who_waits_who_is_missing_and_where():
    waits = {0: wait("all_reduce", [1]), 2: wait("all_reduce", [1])}
    look = Look(waits, running=[], ended=[1], failed=[])
    error = report.hang(waits, look, {1: "it has made no call"}, {}, "")
    assert isinstance(error, HangError) and error.missing == (1,) and sorted(error.waiting) == [0, 2]
    assert lines(error) == [
        "ranks 0, 2 wait in all_reduce; rank 1 never made that call",
        "  ranks 0, 2 wait in all_reduce(4 float32) at cell [4], line 1, for rank 1",
        "  rank 1 has finished its cell; it has made no call",
    ]


def test_a_call_left_open_is_started_not_waited_for():
    waits = {0: wait("all_reduce", [1])}
    error = report.hang(waits, Look({}, [], ended=[0, 1], failed=[]), {1: "it has made no call"}, {}, "")
    assert lines(error)[0] == "rank 0 started all_reduce; rank 1 never made that call"
    assert lines(error)[1] == "  rank 0 started all_reduce(4 float32) at cell [4], line 1"


def test_a_cycle_is_drawn():
    waits = {0: wait("recv", [1]), 1: wait("recv", [2]), 2: wait("recv", [0])}
    error = report.hang(waits, Look(waits, [], [], []), {}, {}, "")
    assert lines(error)[0] == "ranks 0-2 wait for each other: 0 -> 1 -> 2 -> 0"


def test_the_limit_is_named_with_the_setting_that_raises_it():
    waits = {0: wait("barrier", [1])}
    look = Look(waits, running=[1], ended=[], failed=[])
    error = report.hang(waits, look, {1: "it has made no call"}, {1: "cell [4], line 9"}, "", limit_s=20)
    assert lines(error)[0] == "no rank made progress for 20 s while rank 0 waited in barrier"
    assert "  rank 1 is at cell [4], line 9; it has made no call" in lines(error)
    assert "timeout=60" in lines(error)[-1]


@pytest.mark.parametrize("size, new, regrouped, text", [
    (4, [], False, ""),
    (4, [], True, "Variables are kept."),
    (4, [2], True, "rank 2 is new and has no variables; ranks 0-1, 3 kept theirs."),
    (2, [0, 1], True, "ranks 0-1 are new and have no variables."),
])  # fmt: skip
def test_what_is_left_is_said(size, new, regrouped, text):
    assert report.kept_text(size, new, regrouped) == text
    groups = " Make process groups and DDP modules again." if regrouped else ""
    assert report.kept_text(size, new, regrouped, lost_groups=True) == text + groups


def test_errors_show_no_frames_of_dtlab_in_a_notebook():
    assert RankError("text")._render_traceback_() == ["RankError: text"]


# output


def final(*added, ranks=3):
    relay = Relay(range(ranks))
    for rank, kind, data in added:
        relay.add(rank, kind, data)
    return relay.final()


def texts(*added, ranks=3):
    return "".join(text for text, bundle in final(*added, ranks=ranks) if bundle is None)


def test_equal_output_folds_and_the_rest_is_in_rank_order():
    added = [(2, "stdout", "a\n"), (0, "stdout", "b\n"), (1, "stdout", "a\n")]
    assert texts(*added) == "rank 0: b\nranks 1-2: a\n"


def test_order_of_arrival_does_not_matter():
    one = [(0, "stdout", "a\nb\n"), (1, "stdout", "a\nb\n")]
    other = [(1, "stdout", "a\n"), (0, "stdout", "a\n"), (0, "stdout", "b\n"), (1, "stdout", "b\n")]
    assert texts(*one) == texts(*other) == "ranks 0-1: a\nranks 0-1: b\n"


def test_streams_are_told_apart():
    assert texts((0, "stdout", "out\n"), (0, "stderr", "err\n")) == "rank 0: out\nrank 0 (stderr): err\n"


def test_a_bar_drawn_over_itself_leaves_its_last_state():
    assert texts((0, "stdout", "10%\r50%\r100%\n")) == "rank 0: 100%\n"


def test_rich_values_stand_alone_with_their_label():
    bundle = {"text/plain": "<x>", "text/html": "<b>x</b>"}
    entries = final((0, "mime", bundle), (0, "stdout", "t\n"), (1, "mime", {"text/plain": "7"}))
    assert [(label, sorted(b) if b else None) for label, b in entries] == [
        ("rank 0", ["text/html", "text/plain"]), ("rank 0: t\n", None), ("rank 1: 7\n", None)]  # fmt: skip


def test_a_flood_is_cut_and_counted():
    text = texts((0, "stdout", "x" * (KEPT_CHARS - 1) + "\n"), (0, "stdout", "more\n"))
    assert "5 more characters are not shown" in text and len(text) < KEPT_CHARS + 200


def test_silence_shows_nothing():
    assert final() == []
