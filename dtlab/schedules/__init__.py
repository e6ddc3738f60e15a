"""Pipeline schedules as data: what each rank computes, in which order. Pure: no torch, no ranks."""
from dtlab.schedules.check import ScheduleError
from dtlab.schedules.one_f_one_b import gpipe, interleaved_one_f_one_b, one_f_one_b
from dtlab.schedules.schedule import Action, Backward, BackwardInput, BackwardWeight, Forward, Overlap, Schedule
from dtlab.schedules.simulation import PipelineTimeline
from dtlab.schedules.zero_bubble import dualpipe_v, zero_bubble_h1, zero_bubble_h2, zero_bubble_v

__all__ = ["Action", "Backward", "BackwardInput", "BackwardWeight", "Forward", "Overlap", "PipelineTimeline",
           "Schedule", "ScheduleError", "dualpipe_v", "gpipe", "interleaved_one_f_one_b", "one_f_one_b",
           "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v"]
