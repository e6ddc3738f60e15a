"""Machines as numbers: how long an operation and a message take on named hardware, or on this machine. Pure: no torch.

Figures of devices and links are their vendors'; what a program reaches of them, and latencies, are assumptions, stated
where they stand. GB and TB are 10**9 and 10**12 bytes.
"""
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from numbers import Real

import numpy as np

from dtlab.errors import ConfigError
from dtlab.theory import Link, base_op, collective_time_s
from dtlab.validate import amount, at_least, index_below, one_of

# Latency of a hop: what NCCL's own model of its ring counts for large messages ("Simple") over NVLink, PCIe and a
# network, as of NCCL 2.19 (src/graph/tuning.cc). Small messages ("LL") are five to six times quicker there. For
# Ethernet, sockets through the kernel: an assumption, by order of magnitude.
_NVLINK_S, _PCIE_S, _NETWORK_S, _SOCKET_S = 3.4e-6, 5.7e-6, 14e-6, 50e-6


def _link(name, raw_gb_per_s, reached, latency_s, source):
    said = f"{raw_gb_per_s:g} GB/s by {source}; that {reached:.3g} of it is reached is assumed"
    return Link(name, raw_gb_per_s * 1e9 * reached, latency_s, said)


# name, GB/s in one direction for one device, share of it that is reached, latency, where the GB/s are from. NVLink 3
# and InfiniBand HDR reach the 250 and 25 GB/s that the course counts with; the other generations the same share.
LINKS = {link.name: link for link in (
    _link("NVLink 2", 150, 5 / 6, _NVLINK_S, "V100 data sheet, NVIDIA 2020 (300 GB/s both ways)"),
    _link("NVLink 3", 300, 5 / 6, _NVLINK_S, "A100 data sheet, NVIDIA 2021 (600 GB/s both ways)"),
    _link("NVLink 4", 450, 5 / 6, _NVLINK_S, "H100 data sheet, NVIDIA 2023 (900 GB/s both ways)"),
    _link("NVLink 5", 900, 5 / 6, _NVLINK_S, "DGX B200 data sheet, NVIDIA 2024 (14.4 TB/s both ways for 8)"),
    _link("PCIe 3", 15.75, 0.8, _PCIE_S, "PCI-SIG, x16: 16 lanes of 8 GT/s, 128b/130b"),
    _link("PCIe 4", 31.5, 0.8, _PCIE_S, "PCI-SIG, x16: 16 lanes of 16 GT/s, 128b/130b"),
    _link("PCIe 5", 63, 0.8, _PCIE_S, "PCI-SIG, x16: 16 lanes of 32 GT/s, 128b/130b"),
    _link("InfiniBand EDR", 12.5, 1, _NETWORK_S, "InfiniBand Trade Association: 100 Gb/s a port"),
    _link("InfiniBand HDR", 25, 1, _NETWORK_S, "InfiniBand Trade Association: 200 Gb/s a port"),
    _link("InfiniBand NDR", 50, 1, _NETWORK_S, "InfiniBand Trade Association: 400 Gb/s a port"),
    _link("InfiniBand XDR", 100, 1, _NETWORK_S, "InfiniBand Trade Association: 800 Gb/s a port"),
    _link("Ethernet 10", 1.25, 0.9, _SOCKET_S, "IEEE 802.3: 10 Gb/s a port"),
    _link("Ethernet 25", 3.125, 0.9, _SOCKET_S, "IEEE 802.3: 25 Gb/s a port"),
    _link("Ethernet 100", 12.5, 0.9, _SOCKET_S, "IEEE 802.3: 100 Gb/s a port"),
    _link("Ethernet 400", 50, 0.9, _SOCKET_S, "IEEE 802.3: 400 Gb/s a port"),
)}  # fmt: skip

# dense 16-bit tensor FLOP/s, bytes, bytes/s, link inside a node, link between nodes (a port a device), source
_DEVICES = {
    "V100-32GB": (125e12, 32e9, 0.9e12, "NVLink 2", "InfiniBand EDR", "V100 SXM2 data sheet, NVIDIA 2020"),
    "A100-40GB": (312e12, 40e9, 1.555e12, "NVLink 3", "InfiniBand HDR", "A100 SXM data sheet, NVIDIA 2021"),
    "A100-80GB": (312e12, 80e9, 2.039e12, "NVLink 3", "InfiniBand HDR", "A100 SXM data sheet, NVIDIA 2021"),
    "H100": (989.5e12, 80e9, 3.35e12, "NVLink 4", "InfiniBand NDR",
             "H100 SXM data sheet, NVIDIA 2023 (half of its 1,979 TFLOP/s with sparsity)"),
    "H200": (989.5e12, 141e9, 4.8e12, "NVLink 4", "InfiniBand NDR",
             "H200 SXM data sheet, NVIDIA 2024 (half of its 1,979 TFLOP/s with sparsity)"),
    "B200": (2250e12, 180e9, 8e12, "NVLink 5", "InfiniBand NDR",
             "DGX B200 data sheet, NVIDIA 2024 (an eighth; a quarter of its FP8 FLOP/s with sparsity)"),
}  # fmt: skip
_ALIASES = {"V100": "V100-32GB", "A100": "A100-80GB"}
_POSITIVE = ("peak_flops", "memory_bytes", "memory_bandwidth_bytes_per_s", "gemm_efficiency", "memory_efficiency")


@dataclass(frozen=True, repr=False)
class Hardware:
    """Devices, the links between them, and what a program reaches of both.

    Attributes:
        name: what to call it.
        num_devices: devices of the whole machine (count); rank r runs on device r, in node r // node_size.
        node_size: devices of one node (count).
        peak_flops: FLOP/s of one device, dense, 16-bit.
        memory_bytes: bytes of one device.
        memory_bandwidth_bytes_per_s: of one device.
        inside, between: ``Link`` of a device to others of its node, and to those of other nodes; as reached.
        gemm_efficiency: share of ``peak_flops`` that an operation with FLOPs reaches. The presets' half is the
            course's assumption (the rows of large models in Narayanan et al. 2021 reach 44 to 52 % in whole steps).
        memory_efficiency: share of the memory's bandwidth that is reached. The presets' 0.8 is an assumption.
        op_overhead_s: what every operation costs beside its work, in seconds; the presets' 4 us (the launch of a
            kernel) is an assumption, by order of magnitude.
        cores: None: every rank has a device of its own. A number: so many ranks can compute at once.
        measured: of a calibrated machine ``((op, ranks, latency_s, seconds_per_byte), ...)``; used before ``inside``.
        source: where the numbers are from.

    Raises:
        ConfigError: a number that cannot be.
    """

    name: str
    num_devices: int
    node_size: int
    peak_flops: float
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    inside: Link
    between: Link
    gemm_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    op_overhead_s: float = 4e-6
    cores: "int | None" = None
    measured: tuple = ()
    source: str = ""

    def __post_init__(self):
        for name in ("num_devices", "node_size", *(("cores",) if self.cores is not None else ())):
            at_least(name, getattr(self, name), 1)
        for name in (*_POSITIVE, "op_overhead_s"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= value < float("inf") or not (value or name == "op_overhead_s"):
                raise ConfigError(f"{name} ({value!r}) must be a number above 0, and finite")
        for name in ("gemm_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) is a share of the peak: at most 1")
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Link):
                raise ConfigError(f"{name} ({getattr(self, name)!r}) must be a Link, or to preset() the name of one")

    @classmethod
    def preset(cls, name, **changes):
        """Named hardware: ``"8xH100"``, in nodes of 8, with a port to the network for each device.

        Args:
            name: ``"NxDEVICE"``; ``Hardware.presets()`` lists the devices.
            changes: fields to change; ``inside`` and ``between`` may be the name of a link.

        Raises:
            ConfigError: a device, link or field that is not known, or a number that cannot be.

        Example:
            >>> Hardware.preset("64xA100-80GB")
            64xA100-80GB: 64 devices in nodes of 8, each 156 TFLOP/s (peak 312 TFLOP/s), 80 GB at 1.63 TB/s (peak \
2.04 TB/s); NVLink 3 250 GB/s, 3.4 us; between nodes InfiniBand HDR 25 GB/s, 14 us
            >>> Hardware.preset("8xA100", inside="PCIe 4").inside.bandwidth_bytes_per_s
            25200000000.0
        """
        count, device = _parsed(name)
        flops, memory, bandwidth, inside, between, source = _DEVICES[device]
        for field in changes:
            one_of("a field of Hardware", field, [f.name for f in fields(cls)])
        for field in ("inside", "between"):
            if isinstance(changes.get(field), str):
                one_of(field, changes[field], LINKS)
                changes[field] = LINKS[changes[field]]
        machine = cls(f"{count}x{device}", count, 8, flops, memory, bandwidth, LINKS[inside], LINKS[between],
                      source=source)  # fmt: skip
        return replace(machine, **changes)

    @staticmethod
    def presets():
        """All devices with their numbers and sources: a DataFrame with one row a device."""
        import pandas as pd

        rows = []
        for device in _DEVICES:
            machine = Hardware.preset(f"1x{device}")
            row = {field.name: getattr(machine, field.name) for field in fields(machine)}
            for field in ("inside", "between"):
                link = row[field]
                row |= {field: link.name, f"{field}_bytes_per_s": link.bandwidth_bytes_per_s,
                        f"{field}_latency_s": link.latency_s, f"{field}_source": link.source}  # fmt: skip
            rows.append(row)
        table = pd.DataFrame(rows, index=pd.Index(_DEVICES, name="device"))
        return table.drop(columns=["name", "num_devices", "cores", "measured"])

    @staticmethod
    def calibrate(ranks=None):
        """This machine, measured in a few seconds, once a process for each number of ranks.

        Cores, GEMM FLOP/s, memory bandwidth and overhead an operation of one thread; gloo's messages and collectives
        between them. ``dtlab.record.calibration`` says what a replay on it counts.

        Args:
            ranks: live ranks; if not given those of ``dtlab.current_ranks()``, or 4 that are launched for it.
        """
        from dtlab.record.calibration import calibrate  # the one import upwards: measuring needs ranks and torch

        return calibrate(ranks)

    def compute_s(self, flops, bytes, cpu_s=0.0):
        """Seconds that operations take on one device; numbers or arrays of one shape.

        ``op_overhead_s`` plus the roofline: the longer of flops / (peak_flops gemm_efficiency) and bytes /
        (memory_bandwidth memory_efficiency). Where ranks share cores, a measured ``cpu_s`` above 0 counts instead:
        the cores are those it was measured on.

        Args:
            flops, bytes: of each operation, as in ``Event``.
            cpu_s: thread-CPU seconds of each, as recorded.

        Source: Williams, Waterman, Patterson 2009, "Roofline".
        """
        seconds = np.maximum(np.asarray(flops) / (self.peak_flops * self.gemm_efficiency),
                             np.asarray(bytes) / (self.memory_bandwidth_bytes_per_s * self.memory_efficiency))
        seconds = seconds + self.op_overhead_s
        return seconds if self.cores is None else np.where(np.asarray(cpu_s) > 0, cpu_s, seconds)

    def collective_s(self, op, tensor_bytes, ranks, algorithm=None):
        """Seconds of a collective among ``ranks`` (global), once all of them have called it.

        Inside a node at ``inside``; across nodes the cheaper of hierarchical and flat, flat being as slow as
        ``between``. Hierarchical are all_reduce, all_gather and reduce_scatter of as many ranks on each node: uneven
        nodes, and the other ops, are counted flat, which is more than libraries that know the nodes need.

        Args:
            op: name in torch.distributed.
            tensor_bytes: S, the full buffer (bytes).
            algorithm: one of ``theory.ALGORITHMS[op]``; the fastest if not given.

        Raises:
            ConfigError: no ranks, one twice or without a device; an op or an algorithm that is not known.
        """
        ranks = list(ranks) if isinstance(ranks, Iterable) else ranks
        if not isinstance(ranks, list) or len(set(ranks)) < max(len(ranks), 1):
            raise ConfigError(f"ranks ({ranks!r}) must be the global ranks of the group, each once: range(4)")
        size = len(ranks)
        self._node(min(ranks)), self._node(max(ranks))
        on_nodes = Counter(rank // self.node_size for rank in ranks)
        if len(on_nodes) > 1:
            counts = set(on_nodes.values())
            node_size = counts.pop() if len(counts) == 1 else 1
            if node_size > 1:
                return collective_time_s(op, tensor_bytes, size=size, link=self.inside, algorithm=algorithm,
                                         node_size=node_size, link_between=self.between)
            return collective_time_s(op, tensor_bytes, size=size, link=self.between, algorithm=algorithm)
        if self.measured and algorithm is None:
            known = {(name, among): terms for name, among, *terms in self.measured}
            if (base_op(op), size) in known:
                latency_s, seconds_per_byte = known[base_op(op), size]
                return latency_s + tensor_bytes * seconds_per_byte
        return collective_time_s(op, tensor_bytes, size=size, link=self.inside, algorithm=algorithm)

    def p2p_s(self, num_bytes, source, destination):
        """Seconds of a message between two ranks (global): latency plus bytes over bandwidth of the link they share."""
        link = self.inside if self._node(source) == self._node(destination) else self.between
        return link.time_s(amount("num_bytes", num_bytes))

    def _node(self, rank):
        return index_below("rank", rank, f"num_devices of {self.name}", self.num_devices) // self.node_size

    def __repr__(self):
        place = f"{self.num_devices} devices in nodes of {self.node_size}, each"
        if self.cores is not None:
            place = f"{self.num_devices} ranks at most, {self.cores} at once, each"
        bandwidth = self.memory_bandwidth_bytes_per_s
        text = (f"{self.name}: {place} {_short(self.peak_flops * self.gemm_efficiency, 'FLOP/s')} (peak "
                f"{_short(self.peak_flops, 'FLOP/s')}), {_short(self.memory_bytes, 'B')} at "
                f"{_short(bandwidth * self.memory_efficiency, 'B/s')} (peak {_short(bandwidth, 'B/s')})")
        links = f"; {_said(self.inside)}"
        return text + links + (f"; between nodes {_said(self.between)}" if self.num_devices > self.node_size else "")


def _short(amount, unit):
    """Three digits: ``1.56e14`` -> ``156 TFLOP/s``."""
    scale, prefix = (1e12, "T") if amount >= 1e12 else (1e9, "G")
    return f"{amount / scale:.3g} {prefix}{unit}"


def _said(link):
    return f"{link.name} {_short(link.bandwidth_bytes_per_s, 'B/s')}, {link.latency_s * 1e6:.3g} us"


def _parsed(name):
    """``(devices, device)`` of a preset's name."""
    match = re.fullmatch(r"(\d+)x(.+)", name) if isinstance(name, str) else None
    device = match and _ALIASES.get(match[2], match[2])
    if device not in _DEVICES:
        known = ", ".join([*_DEVICES, *(f"{alias} (= {full})" for alias, full in _ALIASES.items())])
        raise ConfigError(f"there is no preset {name!r}: say how many of which device, \"8xH100\"; devices are {known}")
    return at_least("number of devices", int(match[1]), 1), device
