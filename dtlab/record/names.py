"""The globals that code reads."""
import dis
import functools
import types


def global_names(function):
    """Names of the globals that a function reads, through bound methods and partials; its attributes are none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return set() if code is None else names_read(code)


def cell_names(text):
    """Names that the text of a cell reads; none where it is no Python, which running it will tell."""
    try:
        return names_read(compile(text, "<cell>", "exec"))
    except (SyntaxError, ValueError):
        return set()


def names_read(code):
    """Names of the globals that a code object reads, with the functions inside it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(names_read(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))
