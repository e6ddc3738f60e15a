"""The globals that code reads."""
import dis
import functools
import types


def global_names(code):
    """Names of the globals that a function reads, through bound methods and partials; its attributes are none.

    ``code`` may be the text of a cell too; one that is no Python has none, which running it will tell.
    """
    if isinstance(code, str):
        try:
            return _names_read(compile(code, "<cell>", "exec"))
        except (SyntaxError, ValueError):
            return set()
    while isinstance(code, functools.partial):
        code = code.func
    return _names_read(code.__code__) if hasattr(code, "__code__") else set()


def _names_read(code):
    """Names of the globals that a code object reads, with the functions inside it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_names_read(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))
