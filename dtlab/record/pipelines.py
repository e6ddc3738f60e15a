"""While a recording runs, the chunks of torch.distributed.pipelining are phases with stage and micro-batch."""
import contextlib
import functools
import sys

_PHASES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


@contextlib.contextmanager
def name_chunks(phase):
    """Wrap every stage's methods in ``phase(name, stage=, micro_batch=)``."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    methods = {name: getattr(module._PipelineStageBase, name) for name in _PHASES} if module else {}
    for name, method in methods.items():
        setattr(module._PipelineStageBase, name, _named(method, _PHASES[name], phase))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(module._PipelineStageBase, name, method)


def _named(method, name, phase):
    @functools.wraps(method)
    def chunk(self, micro_batch, *args, **kwargs):
        with phase(name, stage=self.stage_index, micro_batch=micro_batch):
            return method(self, micro_batch, *args, **kwargs)

    return chunk
