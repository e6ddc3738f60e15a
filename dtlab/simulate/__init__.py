"""Events of a run, timelines, and the simulator that gives a recording the times of named hardware. Pure: no torch."""
from dtlab.simulate.boxes import Box, Lane
from dtlab.simulate.events import Event, Recording, read_events, write_events
from dtlab.simulate.hardware import Hardware
from dtlab.simulate.replay import replay
from dtlab.simulate.tensor_parallel import (
    MEGATRON_2019,
    context_parallel_attention,
    megatron_2019_efficiency,
    tensor_parallel_layer,
)
from dtlab.simulate.timeline import Timeline

__all__ = ["MEGATRON_2019", "Box", "Event", "Hardware", "Lane", "Recording", "Timeline", "context_parallel_attention",
           "megatron_2019_efficiency", "read_events", "replay", "tensor_parallel_layer", "write_events"]
