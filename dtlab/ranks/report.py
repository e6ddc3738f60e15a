"""The sentences of RankError and HangError: the cause first, then who waited where, then what is left."""
from dtlab.errors import GuardError, HangError, RankError
from dtlab.ranks.board import RECV, RECV_ANY, SEND, rank_list

DIED = "died"  # the type of a failure that was the end of the process
_SIGNALS = {
    6: "aborted (a fatal error in C++ code)",
    7: "bus error (shared memory ran out?)",
    9: "killed, often because memory ran out",
    11: "segmentation fault (a crash in C++ code)",
    15: "terminated",
}


def died_text(status):
    """How a process ended, with the likely cause.

    Example:
        >>> died_text(-9), died_text(3)
        ('signal 9 (killed, often because memory ran out)', 'its process ended with exit code 3')
    """
    if status is not None and status < 0:
        return f"signal {-status}" + (f" ({_SIGNALS[-status]})" if -status in _SIGNALS else "")
    return "its process ended" + ("" if status is None else f" with exit code {status}")


def error_lines(error):
    """``Type: message``, or the message of a death, and the lines it stands on."""
    words = [error["message"]] if error["type"] == DIED else [error["type"], error["message"]]
    lines = [": ".join(filter(None, words))]
    for label, number, function, source in error["frames"][-6:]:
        lines.append(f"  {label}, line {number}" + (f", in {function}" if function != "<module>" else ""))
        if source:
            lines.append(f"    {source.strip()}")
    return lines


def last_calls_text(dead, calls):
    """What a rank that died and the others called last, if they differ: calls that do not fit can end a process.

    Example:
        >>> last_calls_text(1, {0: "all_reduce(2 float32) at line 1", 1: "all_reduce(3 float32) at line 2"})
        '; its last call was all_reduce(3 float32) at line 2, that of rank 0 all_reduce(2 float32) at line 1'
    """
    others = sorted(r for r, call in calls.items() if r != dead and call)
    if not calls.get(dead) or not others or calls[others[0]] == calls[dead]:
        return ""
    return f"; its last call was {calls[dead]}, that of rank {others[0]} {calls[others[0]]}"


def described(kind, message):
    """A failure of which only this is known; see ``cells.describe_error``. ``kind`` is DIED if the process ended."""
    known = {"type": kind, "message": message, "frames": [], "traceback": "", "place": "", "call": "", "name": None}
    return {**known, "group_ended": False, "lost_peer": False}


def failure(world_size, failures, root, stopped, waits, kept, hint=""):
    """The error to raise when ranks failed.

    Args:
        world_size: number of ranks.
        failures: rank -> description of its exception or death.
        root: the rank that failed first, the cause of the rest.
        stopped: ranks that were stopped because of it.
        waits: rank -> where it was stopped.
        kept: sentence on what is left of the ranks' variables.
        hint: a cure that fits the error.
    """
    cause = failures[root]
    same = [r for r, other in failures.items() if _same(other, cause)]
    lines = error_lines(cause)
    lines[0] = f"{rank_list(same)} of {world_size} {_verb(cause)}: {lines[0]}"
    lines += [hint] if hint else []
    for rank, other in sorted(failures.items(), key=lambda item: item[0]):
        if rank not in same:
            lines.append(f"{rank_list([rank])} {_verb(other)} too: {error_lines(other)[0]}")
    if stopped:
        lines.append(f"{rank_list(stopped)}: stopped because {rank_list([root])} failed" + _where(stopped, waits))
    lines += [kept] if kept else []
    error = RankError("\n".join(lines), rank=root, cause=cause["type"], stopped=stopped)
    error.tracebacks = {r: failure["traceback"] for r, failure in failures.items() if failure["traceback"]}
    return error


def _verb(failure):
    return "died" if failure["type"] == DIED else "failed"


def _same(a, b):
    return (a["type"], a["message"], a["frames"]) == (b["type"], b["message"], b["frames"])


def _where(stopped, waits):
    texts = {waits.get(r) for r in stopped}
    if len(texts) == 1 and None not in texts:
        return f", {texts.pop()}"
    known = [f"rank {r} {waits[r]}" for r in stopped if waits.get(r)]
    return f" ({'; '.join(known)})" if known else ""


def hang(stuck, look, last_calls, places, kept, limit_s=None):
    """The error to raise when ranks waited in vain.

    Args:
        stuck: rank -> Wait.
        look: the Look of that moment.
        last_calls: rank -> text of its last call, for ranks that do not wait.
        places: rank -> where its main thread is, for ranks that run.
        kept: sentence on what is left.
        limit_s: the time limit if that ended the wait.
    """
    missing = sorted({m for w in stuck.values() for m in w.missing if m not in stuck})
    over = set(stuck) <= set(look.ended)  # nobody waits: the cell has ended and left calls open
    never = [m for m in missing if m not in look.running] or missing  # who runs may still have been on the way
    lines = [_headline(stuck, never, limit_s, over)]
    for wait, ranks in _grouped(stuck):
        does = "started" if over else "waits in" if len(ranks) == 1 else "wait in"
        whom = f", for {rank_list(wait.missing)}" if wait.missing and not over else ""
        lines.append(f"  {rank_list(ranks)} {does} {wait.call}{whom}")
    if not any(wait.missing for wait in stuck.values()):
        lines.append("All have made these calls. Is their order the same on every rank, and are the sizes equal?")
    for rank in missing:
        doing = "is not part of this cell"
        if rank in look.failed:
            doing = "has failed"
        elif rank in look.ended and rank in last_calls:
            doing = f"has finished its cell; {last_calls[rank]}"
        elif rank not in look.ended:
            doing = f"is at {places.get(rank) or 'an unknown place'}; {last_calls.get(rank, '')}"
        lines.append(f"  rank {rank} {doing}")
    if any(wait.call.op == "new_group" for wait in stuck.values()):
        lines.append("new_group is called by all ranks, in the same order, also by those that are not in the group.")
    if limit_s is not None:
        lines.append(f"If it only needed longer: timeout={int(limit_s * 3) or 1} on launch or run, %%ranks --timeout.")
    lines += [kept] if kept else []
    waiting = {r: str(w.call) for r, w in stuck.items()}
    return HangError("\n".join(lines), waiting=waiting, missing=never, rank=min(never or stuck), cause="hang")


def guarded(verdict, kept):
    """The error to raise when the guard has seen a mistake: its text, and what is left."""
    text, _, rank = verdict
    return GuardError("\n".join([text, *([kept] if kept else [])]), rank=rank, cause="guard")


def _headline(stuck, missing, limit_s, over):
    ops = sorted({w.call.op for w in stuck.values()})
    if limit_s is not None:
        return f"no rank made progress for {limit_s:g} s while {rank_list(stuck)} waited in {' and '.join(ops)}"
    if over and not missing:
        return f"{rank_list(stuck)} started calls that do not fit: {', '.join(ops)}"
    if missing:
        does = "started" if over else "waits in" if len(stuck) == 1 else "wait in"
        wanted = sorted({_wanted(w.call) for w in stuck.values()})
        never = "made that call" if wanted == ops else f"called {' or '.join(wanted)}"
        return f"{rank_list(stuck)} {does} {' or '.join(ops)}; {rank_list(missing)} never {never}"
    return f"{rank_list(stuck)} wait for each other: {_cycle(stuck)}"


def _wanted(call):
    """What the others must call: the same, but a send for a receive."""
    return {SEND: "recv", RECV: "send", RECV_ANY: "send"}.get(call.kind, call.op)


def _cycle(stuck):
    """``0 -> 1 -> 0``: follow the waits until a rank comes back."""
    path = [min(stuck)]
    while True:
        following = next((m for m in stuck[path[-1]].missing if m in stuck), None)
        if following is None:
            return " -> ".join(map(str, path))
        if following in path:
            return " -> ".join(map(str, [*path[path.index(following) :], following]))
        path.append(following)


def _grouped(stuck):
    groups = {}
    for rank, wait in sorted(stuck.items()):
        groups.setdefault((str(wait.call), tuple(wait.missing)), (wait, []))[1].append(rank)
    return groups.values()


def kept_text(world_size, dead, regrouped, lost_groups=False):
    """What is left of the ranks' variables and groups after a repair; empty if all is.

    ``lost_groups``: there were process groups, or modules that hold one, which no longer work.

    Example:
        >>> kept_text(4, [2], True)
        'rank 2 is new and has no variables; ranks 0-1, 3 kept theirs.'
    """
    if not dead and not regrouped:
        return ""
    rest = [r for r in range(world_size) if r not in dead]
    kept = "Variables are kept."
    if dead:
        kept = rank_list(dead) + (" is new and has" if len(dead) == 1 else " are new and have") + " no variables"
        kept += f"; {rank_list(rest)} kept theirs." if rest else "."
    return kept + (" Make process groups and DDP modules again." if lost_groups else "")
