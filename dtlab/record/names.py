"""The globals that a function reads."""
import dis
import functools


def global_names(function):
    """Names of the globals that a function reads, through bound methods and partials; its attributes are none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
