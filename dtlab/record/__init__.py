"""The recorder: what a function does on ranks, below every API, live or dry.

``ranks.record(fn)`` and ``%%ranks --record name`` record live ranks; ``record_dry(fn)`` plays ranks of a world of any
size with fake tensors, in a process of its own. Both give a ``dtlab.simulate.Recording``. In the code ``phase`` names
what happens and ``tag`` says what a tensor is.

Seen are all ``aten`` operators of the main thread and of autograd, and every call of ``torch.distributed``, functional
collectives, DDP's reducer, FSDP2, DTensor and torch's pipelines, each once. What this cannot see, or sees otherwise:

- Operators of other Python threads (torchgpipe's forward); their communication is seen. ``tolist()``, ``numpy()`` and
  what is done to an array: no operator. Code compiled by ``torch.compile`` runs uncompiled while it is recorded.
- Events stay in memory until the function returns (a step of the lessons' GPT makes 1,500): record a few steps.
- On a GPU a compute event lasts as long as the launch of its kernels, not their run.
- FLOPs are those of products, convolutions and attention; fused RNN and sparse operators and ``nn.Bilinear`` count 0.
  torch's fused inference path of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` is off meanwhile.
  ``cpu_s`` is the time of the thread that called; other threads of an operator are not in it.
- Scratch memory inside an operator; the allocator's own reserve; memory of sparse tensors. Memory that was there
  before the recording counts when the function first uses it or holds it (arguments, closure, globals).
- A category holds for the life of a storage: a received activation that autograd never saves is ``other``. What a
  checkpoint computes again counts as activations whether saved again or not. Parameters without ``nn.Parameter``,
  module or optimizer are ``other`` unless tagged.
- A wait inside C++ (DDP's) begins when the operator before it ended and ends at the first touch of what the call
  fills; a call whose result nobody touches has no wait. ``wire_bytes`` of a collective is the ring's, whatever the
  backend does; a call with several tensors (``coalesced``) is modelled as one.
- ``F.dropout`` on the CPU saves a mask in the tensor's own dtype scaled by 1 / (1 - p); ``torch.native_dropout`` a
  byte for each element. CPU FSDP2 gathers without overlap.
- While it is recorded a function cannot use ``torch.func`` transforms: they refuse the hooks on saved tensors.
- Dry: times are 0. DistributedDataParallel, torch's pipelines and whatever reads values cannot be recorded, and say so;
  raw calls, functional collectives, FSDP2 and DTensor can. Make the model in the function or pass it: a captured
  parameter is refused, another tensor that the function captures is not counted.
"""


def __getattr__(name):
    if name in ("phase", "tag", "Recorder"):
        from dtlab.record import recorder

        return getattr(recorder, name)
    if name == "record_dry":
        from dtlab.record.dry import record_dry

        return record_dry
    raise AttributeError(f"module 'dtlab.record' has no attribute {name!r}")
