"""Python's UTF-8 mode: file names, sources and pipes are UTF-8 whatever the locale says."""

import codecs
import locale
import os
import sys

VARIABLE = "PYTHONUTF8"


def enter_utf8_mode() -> None:
    """Start this command again in UTF-8 mode, if the locale has another encoding.

    With `LC_ALL=C PYTHONUTF8=0`, or a locale of ISO-8859-1, libraries that read their own sources
    without an encoding fail, and file names are read wrong. Child processes inherit the mode.
    """
    if sys.flags.utf8_mode or codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    # Set, but ignored: `python -E` would start itself again forever.
    if os.environ.get(VARIABLE) == "1":
        return
    os.environ[VARIABLE] = "1"
    # `orig_argv` keeps options of Python such as -m.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
