"""Events of a run, timelines, and the simulator that gives a recording the times of named hardware. Pure: no torch."""
from dtlab.simulate.boxes import Box, Lane
from dtlab.simulate.events import Event, Recording, read_events, write_events
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.replay import replay
from dtlab.simulate.timeline import Timeline

__all__ = ["Box", "Event", "Hardware", "Lane", "Recording", "Timeline", "read_events", "replay", "write_events"]
