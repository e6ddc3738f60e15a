"""The rows of ZeRO: a step of ours and of DeepSpeed's stages 1 and 2, of ours and of torch's fully_shard, in turns."""
import contextlib

from benchmarks.data_parallel import keep_steps, time_step
from benchmarks.registry import at_most, row
from benchmarks.steps import training_step

DEEPSPEED, FSDP2 = "DeepSpeed", "torch fully_shard"
NUM_RANKS, BATCH_SIZE = 2, 4


def make_zero_steps(stage, peers):
    """On a rank: ``{name: a training step}`` of the lessons' GPT by ours and by DeepSpeed, if that is there."""
    import torch
    import torch.nn.functional as F

    from dtlab.data.recordings import deepspeed_engine
    from dtlab.models import GPT, GPTConfig
    from dtlab.parallel import ZeroOptimizer

    tokens = torch.randint(0, 256, (BATCH_SIZE, 128))

    def loss_of(model):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def ours():
        model = GPT(GPTConfig())
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, zero_stage=stage)

        def step():
            loss_of(model).backward()
            optimizer.step()

        return step

    def theirs():
        model, zero = GPT(GPTConfig()), {"stage": stage, "reduce_bucket_size": 25 * 2**18}  # 25 MiB, as ours
        engine = deepspeed_engine(model, torch.optim.AdamW(model.parameters()), micro_batch_size=BATCH_SIZE, zero=zero)

        def step():
            engine.backward(loss_of(engine))
            engine.step()

        return step

    return {"dtlab": ours(), **({DEEPSPEED: theirs()} if DEEPSPEED in peers else {})}


def make_sharded_steps():
    """On a rank: ``{name: a training step}`` of the lessons' GPT, a unit for each layer, by ours and by torch's."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from dtlab.models import GPT, GPTConfig
    from dtlab.parallel import FullyShardedModule

    theirs, tokens = GPT(GPTConfig()), torch.randint(0, 256, (BATCH_SIZE, 128))
    for part in (*theirs.layers, theirs):
        fully_shard(part)
    return {"dtlab": training_step(FullyShardedModule(GPT(GPTConfig())), tokens),
            FSDP2: training_step(theirs, tokens)}


def run_step(name):
    """On a rank: one step."""
    import __main__

    __main__.steps[name]()


def names_of_steps():
    """On a rank: which are kept."""
    import __main__

    return list(__main__.steps)


@contextlib.contextmanager
def kept_steps(make, *args):
    """Ranks that keep the steps that ``make`` makes, each run a few times; and the steps' names."""
    import dtlab

    with dtlab.launch(NUM_RANKS, guard=False) as ranks:
        ranks.run(keep_steps, make, *args)
        names = ranks.run(names_of_steps)[0]
        for name in names:
            ranks.run(time_step, name, 5)
        yield ranks, names


def seconds(bench, make, *args):
    """Median step of the slowest rank in each round."""
    with kept_steps(make, *args) as (ranks, names):
        samples = {name: [] for name in names}
        for number in range(1 if bench.quick else 12):
            for name in names[:: 1 if number % 2 else -1]:
                samples[name].append(max(ranks.run(time_step, name, 5)))
    return samples


def peak_bytes(make, *args):
    """The most that lives at a time in a recorded step, on the fullest rank: all storages that the step uses."""
    with kept_steps(make, *args) as (ranks, names):
        return {name: [int(ranks.record(run_step, name).memory().peak.max())] for name in names}


@row("ZeRO stage 1 step of the lessons' GPT, 2 ranks", "s", {DEEPSPEED: at_most(1.1)})
def zero_1_step(bench, peers):
    return seconds(bench, make_zero_steps, 1, peers)


@row("ZeRO stage 2 step of the lessons' GPT, 2 ranks", "s", {DEEPSPEED: at_most(1.1)})
def zero_2_step(bench, peers):
    return seconds(bench, make_zero_steps, 2, peers)


@row("ZeRO stage 3 step of the lessons' GPT, 2 ranks", "s", {FSDP2: at_most(1.1)})
def zero_3_step(bench, peers):
    return seconds(bench, make_sharded_steps)


@row("ZeRO stage 1: peak memory in a recorded step", "MiB", {DEEPSPEED: at_most(1.1)})
def zero_1_memory(bench, peers):
    return peak_bytes(make_zero_steps, 1, peers)


@row("ZeRO stage 2: peak memory in a recorded step", "MiB", {DEEPSPEED: at_most(1.1)})
def zero_2_memory(bench, peers):
    return peak_bytes(make_zero_steps, 2, peers)


@row("ZeRO stage 3: peak memory in a recorded step", "MiB", {FSDP2: at_most(1.1)})
def zero_3_memory(bench, peers):
    return peak_bytes(make_sharded_steps)
