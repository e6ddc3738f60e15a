"""Numbers as they are read: three digits, and a unit with its prefix. GB and TB are 10**9 and 10**12 bytes,
GiB 2**30."""
from math import floor, log10

_PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}


def in_units(amount, unit):
    """An amount of 0 or more with the prefix that fits; seconds are counted in thousands, not in ks.

    Example:
        >>> [in_units(*said) for said in ((1.125e15, "FLOP/s"), (25e9, "B/s"), (1.714e-3, "s"), (999.9e-6, "s"))]
        ['1.12 PFLOP/s', '25 GB/s', '1.71 ms', '1 ms']
        >>> in_units(0, "s"), in_units(86400, "s")
        ('0 s', '86,400 s')
    """
    power = 3 * floor(log10(float(f"{amount:.3g}")) / 3) if amount else 0
    power = min(max(power, min(_PREFIXES)), 0 if unit == "s" else max(_PREFIXES))
    number = amount / 10**power
    return f"{number:.3g} {_PREFIXES[power]}{unit}" if number < 999.5 else f"{number:,.0f} {_PREFIXES[power]}{unit}"


def in_binary_units(num_bytes):
    """Bytes, 0 or more, with the binary prefix that fits: MiB is 2**20 and GiB 2**30 bytes.

    Example:
        >>> [in_binary_units(n) for n in (956_301_312, 11_328 * 2**20, 25e9, 1023)]
        ['912 MiB', '11.1 GiB', '23.3 GiB', '1,023 B']
    """
    for power, prefix in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if num_bytes >= 2**power:
            number = num_bytes / 2**power
            return f"{number:.3g} {prefix}B" if number < 999.5 else f"{number:,.0f} {prefix}B"
    return f"{num_bytes:,.0f} B"
