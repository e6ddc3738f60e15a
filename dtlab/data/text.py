"""Real text without a download: the Python reference manual that ships inside every CPython."""
import sys
from pathlib import Path

from dtlab.errors import ConfigError


def text_bytes(path=None) -> bytes:
    """The text as UTF-8 bytes, one byte a token: vocabulary 256.

    Without ``path`` it is ``pydoc_data.topics``, the texts of Python's own ``help()``: about half a megabyte of
    English, read where it is installed. It differs between Python builds, so losses on it are compared within one
    machine only; for numbers that hold everywhere use ``SyntheticLanguage``.

    Args:
        path: A text file of your own instead.

    Raises:
        ConfigError: this Python came without the manual, or ``path`` cannot be read or is empty.

    Example:
        >>> len(text_bytes()) > 400_000
        True
    """
    if path is not None:
        return _read_file(Path(path))
    try:
        from pydoc_data.topics import topics
    except ImportError:
        version = ".".join(map(str, sys.version_info[:3]))
        raise ConfigError(
            f"this Python {version} ({sys.executable}) came without pydoc_data.topics, the text that the lessons train "
            "on. Use a Python from python.org, conda or your system's full package (on Debian and Ubuntu: apt install "
            "libpython3-stdlib), or give a text file of at least 100 kB: text_bytes('my_text.txt')") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read_file(path: Path) -> bytes:
    """A file's bytes; ConfigError where there are none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the text {str(path)!r}: {error.strerror}") from None
    if not content:
        raise ConfigError(f"the text {str(path)!r} is empty (0 bytes); about 100 kB is enough for a lesson")
    return content
