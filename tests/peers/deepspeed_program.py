# ruff: noqa: F821  (names that live on the ranks)
"""The program of lesson 05 that trains with DeepSpeed. Run it to write the recording that is shipped for those without.

    python tests/peers/deepspeed_program.py dtlab/data/recordings/deepspeed_zero3.jsonl
"""
import dataclasses
import sys

import torch

import dtlab
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.simulate import Recording

WORLD_SIZE, BATCH_SIZE = 4, 8
config = GPTConfig(vocab_size=32, seq_length=32, hidden_size=32, num_layers=2, num_heads=4)
data = SyntheticLanguage(vocab_size=32).sample(65536, seed=0)


def deepspeed_start(stage):
    global engine
    import os
    import warnings
    warnings.simplefilter("ignore", FutureWarning)  # it uses names that torch is about to drop
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed
    zero = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 10_000, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": BATCH_SIZE // world_size, "zero_optimization": zero,
                "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # 1.0 unless you say so
    model = GPT(config, seed=0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                                      config=settings, dist_init_required=False)


def deepspeed_step(step):
    inputs, targets = shard_batch(batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step), rank, world_size)
    loss = cross_entropy(engine(inputs), targets, reduction="mean")
    engine.backward(loss)
    engine.step()
    return loss.item()


def record(ranks, stage=3):
    """The third step of training: in the first ones, DeepSpeed notes the order in which modules are used."""
    ranks.run(deepspeed_start, stage)
    for step in range(2):
        ranks.run(deepspeed_step, step)
    return ranks.record(deepspeed_step, 2)


def small(recording):
    """What is shipped: rank 0, which stands for all, with times in microseconds."""
    events = [dataclasses.replace(e, **{name: round(getattr(e, name), 6) for name in ("start_s", "end_s", "cpu_s")})
              for e in recording.events[0]]
    return Recording({0: events}, world_size=recording.world_size, meta=recording.meta)


if __name__ == "__main__":
    with dtlab.launch(WORLD_SIZE) as ranks:
        small(record(ranks)).save(sys.argv[1])
