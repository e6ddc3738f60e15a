"""Events of a run, timelines, and the simulator that gives a recording the times of named hardware. Pure: no torch."""
from dtlab.simulate.boxes import Box, Lane
from dtlab.simulate.events import Event, Recording, read_events, write_events
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.replay import replay
from dtlab.simulate.tensor_parallel import context_parallel_attention, tensor_parallel_layer
from dtlab.simulate.timeline import Timeline

__all__ = ["Box", "Event", "Hardware", "Lane", "Recording", "Timeline",
           "context_parallel_attention", "read_events", "replay", "tensor_parallel_layer", "write_events"]
