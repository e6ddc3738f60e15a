"""Recordings on disk: what is written is read; what is no recording, cut short or newer is refused with its reason."""
import json

import numpy
import pytest
from hand_made import one_f_one_b, two_ranks

from dtlab.errors import ConfigError
from dtlab.simulate import Event, Recording, read_events, write_events

GOLDEN = """\
{"dtlab_recording":1,"world_size":4,"ranks":[0,2],"meta":{"dry":true}}
{"rank":0,"kind":"compute","op":"aten.mm","start_s":0.0,"end_s":0.5,"flops":64,"reads":[1,2],"writes":[3]}
{"rank":2,"kind":"issue","op":"all_reduce","start_s":0.0,"end_s":0.0,"bytes":8,"wire_bytes":12.0,"group":"0,2#0:dp",\
"seq":0,"where":"cell [3], line 4","phase":{"name":"backward","micro_batch":1}}
{"end":2}
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.jsonl"


def golden():
    return {0: [Event("compute", "aten.mm", 0.0, 0.5, flops=64, reads=(1, 2), writes=(3,))],
            2: [Event("issue", "all_reduce", 0.0, 0.0, bytes=8, wire_bytes=12.0, group="0,2#0:dp", seq=0,
                      where="cell [3], line 4", phase={"name": "backward", "micro_batch": 1})]}


def test_the_format_is_the_documented_one(file):
    write_events(file, golden(), world_size=4, meta={"dry": True})
    assert file.read_text() == GOLDEN
    assert read_events(file) == (golden(), 4, {"dry": True})


@pytest.mark.parametrize("make", [two_ranks, one_f_one_b, lambda: Recording({}), lambda: Recording({3: []})])
def test_what_is_saved_is_loaded(make, file):
    recording = make()
    recording.save(file)
    loaded = Recording.load(file)
    assert (loaded.events, loaded.ranks) == (recording.events, recording.ranks)
    assert (loaded.world_size, loaded.meta, loaded.results) == (recording.world_size, recording.meta, None)
    assert loaded.memory().equals(recording.memory())


def test_numbers_of_numpy_become_plain_ones(file):
    event = Event("compute", "op", numpy.float64(0.5), 1.0, flops=numpy.int64(3), phase={"micro_batch": numpy.int64(2)})
    Recording({0: [event]}, meta={"tokens": numpy.int32(5)}).save(file)
    assert Recording.load(file).events[0] == [Event("compute", "op", 0.5, 1.0, flops=3, phase={"micro_batch": 2})]


def test_what_no_file_can_hold_is_named(file):
    with pytest.raises(ConfigError, match="numbers and text, not object"):
        Recording({0: []}, meta={"model": object()}).save(file)


def test_a_file_cut_anywhere_is_refused(file):
    for length in range(len(GOLDEN) - 1):
        file.write_text(GOLDEN[:length])
        with pytest.raises(ConfigError, match="cut short|its first line is no header"):
            Recording.load(file)


def test_a_cut_file_says_how_far_it_reaches(file):
    file.write_text(GOLDEN[: GOLDEN.index('"issue"')])
    with pytest.raises(ConfigError, match="run.jsonl' is cut short after 1 events"):
        Recording.load(file)


@pytest.mark.parametrize("text, words", [
    ("", "no dtlab recording"),
    ("[1, 2]\n", "no dtlab recording"),
    ('{"traceEvents": []}\n', "no dtlab recording"),
    ("rank,op\n0,mm\n", "no dtlab recording"),
    ('{"dtlab_recording":"one"}\n', "no dtlab recording"),
    ('{"dtlab_recording":1,"ranks":[0]}\n', "lacks ranks, world_size or meta"),
    ('{"dtlab_recording":1,"ranks":3,"world_size":4,"meta":{}}\n', "lacks ranks, world_size or meta"),
    ('{"dtlab_recording":1,"ranks":[0,4],"world_size":4,"meta":{}}\n', "or a rank is not in the world"),
    ('{"dtlab_recording":1,"ranks":[-1],"world_size":4,"meta":{}}\n', "or a rank is not in the world"),
    ('{"dtlab_recording":2,"layout":"new"}\n', "format 2, newer than 1, which this dtlab reads: update dtlab"),
])
def test_foreign_and_newer_files_are_refused(file, text, words):
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Recording.load(file)


def test_binary_and_missing_files_are_refused(file):
    with pytest.raises(ConfigError, match="there is no recording .*run.jsonl"):
        Recording.load(file)
    for what in (file.parent, None):
        with pytest.raises(ConfigError, match="cannot be read as a recording"):
            Recording.load(what)
    file.write_bytes(b"\x80\x04\x95\xff\xfe pickled")
    with pytest.raises(ConfigError, match="it is not text"):
        Recording.load(file)


@pytest.mark.parametrize("line, words", [
    ("oops", "line 3 is no JSON object"),
    ('{"rank":1,"kind":"wait","op":"","start_s":0,"end_s":1}', r"line 3: rank 1 is not in the header's \[0, 2\]"),
    ('{"rank":0,"kind":"wait","op":"","start_s":0}', "line 3: an event lacks end_s"),
    ('{"rank":0,"kind":"nap","op":"","start_s":0,"end_s":1}', "line 3: kind 'nap' is none of compute, issue"),
    ('{"rank":0,"kind":"wait","op":"","start_s":0,"end_s":1,"speed":3}', "line 3: an event has no field 'speed'"),
    ('{"rank":0,"kind":"wait","op":"","start_s":0,"end_s":"1"}', r"line 3: end_s \('1'\) should be of type float"),
    ('{"rank":0,"kind":"wait","op":"","start_s":0,"end_s":1,"tag":true}',
     r"line 3: tag \(True\) should be of type int"),
    ('{"rank":0,"kind":"wait","op":"","start_s":0,"end_s":NaN}', r"line 3: end_s \(nan\) cannot be"),
    ('{"rank":0,"kind":"issue","op":"","start_s":0,"end_s":1,"bytes":-1}', r"line 3: bytes \(-1\) cannot be"),
    ('{"end":5}', "it should have 5 events and has 1"),
])
def test_damage_is_named_with_its_line(file, line, words):
    lines = GOLDEN.splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(ConfigError, match=words):
        Recording.load(file)


def test_events_have_their_own_phase():
    first, second = Event("wait", "recv", 0, 1), Event("wait", "recv", 0, 1)
    first.phase["name"] = "forward"
    assert second.phase == {}


def test_ranks_are_in_order_and_the_world_may_be_larger():
    recording = Recording({8: [], 0: []}, world_size=1024, meta={"dry": True})
    assert recording.ranks == [0, 8] and repr(recording) == "Recording (dry): 2 of 1024 ranks, 0 events"
    assert Recording({0: [], 1: []}).world_size == 2


def test_the_first_line_is_enough_to_know_a_file(file):
    two_ranks().save(file)
    assert json.loads(file.read_text().split("\n")[0])["dtlab_recording"] == 1
