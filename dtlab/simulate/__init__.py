"""Events of a run and timelines drawn from them. Pure: no torch."""
from dtlab.simulate.events import Event, Recording, read_events, write_events
from dtlab.simulate.timeline import Box, Lane, Timeline

__all__ = ["Box", "Event", "Lane", "Recording", "Timeline", "read_events", "write_events"]
