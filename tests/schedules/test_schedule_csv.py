"""The format of torch.distributed.pipelining, both ways, with torch's own parser, printer and action lists."""
import csv
from types import SimpleNamespace

import pytest
import torch
from naive import MAKERS, is_allowed
from torch.distributed.pipelining import schedules as torchs

from dtlab import schedules
from dtlab.errors import ConfigError
from dtlab.schedules import Action, Backward, Forward, Schedule, ScheduleError


def torch_schedule(name, p, m, chunks=1):
    """torch's schedule on the first rank, with stages that are never run; it knows the order of all ranks."""
    if not hasattr(torchs, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    kind, its = getattr(torchs, name), stages(p, chunks)
    schedule = kind(its if issubclass(kind, torchs.PipelineScheduleMulti) else its[0], n_microbatches=m)
    if not getattr(schedule, "pipeline_order", None):
        pytest.skip(f"torch {torch.__version__} has no list of {name}")
    return schedule


def stages(p, chunks):
    return [SimpleNamespace(num_stages=p * chunks, group_size=p, group_rank=0, stage_index=0, is_first=True,
                            is_last=False, submod=torch.nn.Identity(), has_backward=True) for _ in range(chunks)]


def written_by_torch(schedule, path):
    try:
        schedule._dump_csv(path, format="compute_only")
    except (AttributeError, TypeError):  # it writes none where a rank has one stage, nor, when it is old, without sends
        write(path, schedule.pipeline_order)
    return path


def write(path, order):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))


def actions_of(order):
    """torch's list as ours."""
    def ours(action):
        if getattr(action, "sub_actions", None):
            return Action.pair(*map(ours, action.sub_actions))
        return Action(action.computation_type.value, action.stage_index, action.microbatch_index)

    return [[ours(action) for action in order[rank] if action is not None] for rank in sorted(order)]


@pytest.mark.parametrize("name, chunks, make, is_right", [
    ("ScheduleGPipe", 1, schedules.gpipe, lambda p, m: True),
    ("ScheduleInterleaved1F1B", 2, MAKERS["interleaved_2"], lambda p, m: is_allowed("interleaved", p, m)),
    ("ScheduleInterleaved1F1B", 3, MAKERS["interleaved_3"], lambda p, m: is_allowed("interleaved", p, m)),
    ("ScheduleInterleaved1F1B", 4, MAKERS["interleaved_4"], lambda p, m: is_allowed("interleaved", p, m)),
    ("ScheduleInterleavedZeroBubble", 1, schedules.zero_bubble_h1, lambda p, m: is_allowed("interleaved", p, m)),
    ("ScheduleZBVZeroBubble", 2, schedules.zero_bubble_v, lambda p, m: m >= 2 * p - 1),
    ("ScheduleDualPipeV", 2, schedules.dualpipe_v, lambda p, m: m >= 2 * p),
])  # fmt: skip
def test_the_order_is_torchs(name, chunks, make, is_right, tmp_path):
    compared = 0
    for p in (1, 2, 3, 4, 5, 8):
        for m in filter(lambda m: is_right(p, m), (1, 3, 4, 7, 10, 16)):
            theirs = torch_schedule(name, p, m, chunks)
            read = Schedule.from_csv(written_by_torch(theirs, tmp_path / "torch.csv")).check()
            ours = make(p, m)
            assert read.actions == ours.actions, (p, m)
            assert (read.num_stages, read.num_micro_batches, read.stage_to_rank) == (p * chunks, m, ours.stage_to_rank)
            compared += 1
    assert compared > 8


@pytest.mark.parametrize("name", MAKERS)
def test_torch_reads_what_is_written_and_prints_it_as_its_own(name, tmp_path):
    if name.endswith("_v") and not hasattr(torchs, "ScheduleDualPipeV"):
        pytest.skip(f"torch {torch.__version__} reads neither pairs nor another place of a stage than its own")
    p, m = 3, 6
    schedule = MAKERS[name](p, m)
    text = schedule.to_csv(tmp_path / "ours.csv")
    theirs = torchs._PipelineScheduleRuntime(stages(p, schedule.num_stages // p), m)
    theirs._load_csv(tmp_path / "ours.csv")
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.stage_to_rank))
    assert actions_of(theirs.pipeline_order) == schedule.actions
    printed = torchs._format_pipeline_order(theirs.pipeline_order)
    assert printed == torchs._format_pipeline_order(dict(enumerate(schedule.actions)))
    with open(written_by_torch(theirs, tmp_path / "again.csv"), newline="") as file:
        assert file.read() == text


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_written_is_read_as_it_was(name, tmp_path):
    schedule = MAKERS[name](3, 6)
    assert Schedule.from_csv(schedule.to_csv(tmp_path / "s.csv"), name=schedule.name) == schedule
    assert Schedule.from_csv(str(tmp_path / "s.csv"), name=schedule.name) == schedule


def test_torchs_files_with_sends_and_receives_are_read(tmp_path):
    theirs = torch_schedule("ScheduleInterleaved1F1B", 2, 4, 2)
    if not hasattr(theirs, "pipeline_order_with_comms"):
        pytest.skip(f"torch {torch.__version__} runs it without a list of sends")
    write(tmp_path / "comms.csv", theirs.pipeline_order_with_comms)
    assert "SEND_F" in (tmp_path / "comms.csv").read_text()
    assert Schedule.from_csv(tmp_path / "comms.csv").check().actions == MAKERS["interleaved_2"](2, 4).actions


def test_torchs_picture_of_1f1b_is_wrong_on_the_last_rank_and_is_refused(tmp_path):
    """The order that torch 2.13 draws, not the one that it runs: the last rank forwards 1 to m, never 0."""
    theirs = Schedule.from_csv(written_by_torch(torch_schedule("Schedule1F1B", 4, 8), tmp_path / "1f1b.csv"))
    ours = schedules.one_f_one_b(4, 8)
    assert theirs.actions[:3] == ours.actions[:3]
    if theirs.actions[3] == ours.actions[3]:
        pytest.skip(f"torch {torch.__version__} has it right")
    assert theirs.actions[3][:2] == [Action(Forward, 3, 1), Action(Backward, 3, 0)]
    with pytest.raises(ScheduleError) as error:
        theirs.check()
    assert (error.value.rule, error.value.rank, error.value.stage, error.value.micro_batch) == ("complete", 3, 3, 0)
    theirs.num_micro_batches = 8
    with pytest.raises(ScheduleError, match=r"known: rank 3 has 3F8.*micro-batches 0 to 7"):
        theirs.check()


def test_torchs_zero_bubble_v_of_few_micro_batches_is_longer(tmp_path):
    """Micro-batches that are not there leave their gaps in torch's order; ours fills them."""
    theirs = Schedule.from_csv(written_by_torch(torch_schedule("ScheduleZBVZeroBubble", 8, 8, 2), tmp_path / "v.csv"))
    times = [schedule.check().simulate(forward_s=.5, backward_s=1).step_time_s
             for schedule in (theirs, schedules.zero_bubble_v(8, 8))]  # fmt: skip
    assert times == [31, 27.5]


@pytest.mark.parametrize("text, said", [
    ("0F0,0X0\n", r"line 1, cell 2 \('0X0'\) is no action"), ("0F0\n1F\n", r"line 2, cell 1 \('1F'\)"),
    ("(0F0;1B0)OVERLAP\n", "OVERLAP"), ("\n", "nothing to compute"), ("0SEND_F0\n", "nothing to compute"),
])  # fmt: skip
def test_what_is_no_schedule_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        Schedule.from_csv(text)


def test_a_stage_that_no_rank_computes_is_missed():
    with pytest.raises(ScheduleError, match="complete: rank None never computes forward, stage 0, micro-batch 0"):
        Schedule.from_csv("1F0,1B0\n").check()


def test_a_micro_batch_that_is_left_out_between_others_is_missed():
    schedule = Schedule.from_csv("0F0,0B0,0F2,0B2\n")
    assert schedule.num_micro_batches == 3
    with pytest.raises(ScheduleError, match="complete: rank 0 never computes forward, stage 0, micro-batch 1"):
        schedule.check()
